"""A mini-batch has one loss, one gradient and one set of metrics, however its rows are ordered, padded and split over ranks and micro-batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.algorithms import losses
from streamrl.config.losses import POLICY_LOSSES
from tests.algorithms.loss_cases import LOSSES, PAIRS, Batch, make_batch, run

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
ROWS = 6


def partitions(items):
    """Every set partition: 52 for five rows."""
    if not items:
        yield []
        return
    first, *rest = items
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for i in range(len(smaller)):
            yield [*smaller[:i], [first, *smaller[i]], *smaller[i + 1 :]]


def assert_same(one, other, tolerance):
    for x, y in zip(one[:2], other[:2], strict=True):
        assert torch.allclose(x, y, rtol=tolerance, atol=tolerance * float(one[1].abs().max()))
    assert one[2] == pytest.approx(other[2], rel=10 * tolerance, abs=tolerance)


@pytest.mark.parametrize(("name", "mode"), PAIRS)
def test_every_split_of_a_batch_gives_its_loss_gradient_and_metrics(name, mode):
    batch = make_batch(1, num_rows=5)
    whole = run(name, mode, batch, [[0, 1, 2, 3, 4]])
    assert whole[1].any()
    for i, parts in enumerate(partitions([0, 1, 2, 3, 4])):
        assert_same(whole, run(name, mode, batch, parts, dp=1 + i % 4), TOLERANCE[torch.float64])


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.permutations(range(ROWS)), st.lists(st.integers(0, 3), min_size=ROWS, max_size=ROWS), st.integers(1, 4))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_order_ranks_and_micro_batches_do_not_matter_to_any_loss(dtype, seed, order, places, dp):
    batch = make_batch(seed, ROWS, dtype=dtype)
    parts = [part for place in range(4) if (part := [row for row in order if places[row] == place])]
    for name, mode in PAIRS:
        assert_same(run(name, mode, batch, [list(range(ROWS))]), run(name, mode, batch, parts, dp), TOLERANCE[dtype])


@pytest.mark.parametrize(("name", "mode"), PAIRS)
def test_padding_columns_padding_rows_and_masked_mates_change_nothing(name, mode):
    batch = make_batch(3)
    extra_columns, extra_rows = 3, 2

    def padded(column, filler):
        wide = torch.cat([column, torch.full((ROWS, extra_columns), filler, dtype=column.dtype)], 1)
        return torch.cat([wide, torch.full((extra_rows, wide.shape[1]), filler, dtype=column.dtype)])

    fillers = {"old": 5.0, "new": -7.0, "advantages": 9.0, "mask": 0, "weights": 3.0}
    bigger = Batch(**{field: padded(getattr(batch, field), filler) for field, filler in fillers.items()}, sessions=[*batch.sessions, 90, 91])
    value, gradient, metrics = run(name, mode, batch, [list(range(ROWS))])
    for parts in ([list(range(ROWS + extra_rows))], [[6], [0, 7, 1], [2, 3, 4, 5]]):
        other = run(name, mode, bigger, parts, dp=2)
        assert not other[1][ROWS:].any() and not other[1][:, batch.old.shape[1] :].any()
        assert_same((value, gradient, metrics), (other[0], other[1][:ROWS, : batch.old.shape[1]], other[2]), TOLERANCE[torch.float64])


@pytest.mark.parametrize("name", LOSSES)
def test_a_session_of_several_rows_counts_as_one_sequence(name):
    one = make_batch(5, 2, 4)
    one.mask[:] = 1
    one.sessions[:] = [0, 1]
    doubled = one.rows([0, 0, 1])
    doubled.sessions[:] = [0, 0, 1]
    mode = POLICY_LOSSES[name].default_mode if POLICY_LOSSES[name].fixed_mode else "seq-mean-token-mean"
    if not POLICY_LOSSES[name].batch_dependent:
        value, gradient, _ = run(name, mode, one, [[0, 1]])
        twice, gradients, _ = run(name, mode, doubled, [[0], [1, 2]])
        assert torch.allclose(value, twice) and torch.allclose(gradient[0], gradients[0] + gradients[1]) and torch.allclose(gradient[1], gradients[2])


def test_session_weights_count_rows_that_have_a_token():
    mask = torch.tensor([[1, 0], [0, 0], [1, 1], [0, 1], [0, 0]])
    assert losses.session_weights(["a", "a", "b", "b", "c"], mask).tolist() == [1.0, 0.0, 0.5, 0.5, 0.0]

"""What must not matter: row order, padding, observations, rejected samples, what stands in masked slots; and inputs at the edges."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.algorithms.whitening import masked_var, whiten
from tests.algorithms.answers import ALL, GROUP, PER_TOKEN, Batch, batch_of, estimate, rows, spread

every_estimator = pytest.mark.parametrize("name", ALL)

MASKS = [[1, 1, 1], [1, 0, 1, 1], [1], [1, 1], [0, 1, 0, 1, 1], [1, 1, 1, 1], [1, 0, 0, 1]]
SCORES, UIDS = [1, 0, 0.5, 2, -1, 0.25, 1.5], ["A", "B", "A", "B", "A", "B", "A"]


def two_interleaved_groups() -> Batch:
    return batch_of(MASKS, SCORES, UIDS)


@every_estimator
@settings(max_examples=25, deadline=None)
@given(
    answers=st.lists(st.tuples(st.sampled_from("AB"), st.floats(-5, 5, width=32), st.lists(st.integers(0, 1), min_size=1, max_size=6)), min_size=2, max_size=9),
    random=st.randoms(use_true_random=False),
)
def test_row_order_never_matters(name, answers, random):
    answers = [*answers, *(("A", 1.0, [1]), ("A", 0.5, [1, 1]), ("B", 1.0, [1]), ("B", 0.0, [1]))]  # no prompt is sampled once
    batch = batch_of([mask for _, _, mask in answers], [score for _, score, _ in answers], [uid for uid, _, _ in answers])
    order = list(range(len(answers)))
    random.shuffle(order)
    for straight, shuffled in zip(estimate(name, batch), estimate(name, rows(batch, order)), strict=True):
        assert torch.allclose(shuffled, straight[order], atol=1e-5, rtol=1e-5)


@every_estimator
def test_padding_changes_no_bit(name):
    batch = two_interleaved_groups()
    width = batch["response_mask"].shape[1]
    places = torch.arange(width).expand(len(MASKS), width)
    for narrow, wide in zip(estimate(name, batch), estimate(name, spread(batch, places, width + 5)), strict=True):
        assert torch.equal(wide[:, :width], narrow) and not wide[:, width:].any()


@every_estimator
@pytest.mark.parametrize("seed", range(4))
def test_inserted_observations_change_no_bit_of_a_trained_token(name, seed):
    """Nor does it matter what stands there. optimal_token_baseline compares columns, which is why there is a second one: its returns stay."""
    batch, dice = two_interleaved_groups(), np.random.default_rng(seed)
    width = batch["response_mask"].shape[1]
    places = torch.as_tensor(np.stack([np.sort(dice.choice(width + 6, width, replace=False)) for _ in MASKS]))
    plain, longer = estimate(name, batch), estimate(name, spread(batch, places, width + 6, filler=math.nan))
    for before, after in list(zip(plain, longer, strict=True))[name == "optimal_token_baseline" :]:
        assert torch.equal(after.gather(1, places), before) and torch.count_nonzero(after) == torch.count_nonzero(before)


@every_estimator
def test_masked_slots_are_exactly_zero_and_their_content_does_not_matter(name):
    batch = two_interleaved_groups()
    off = batch["response_mask"] == 0
    expected = estimate(name, batch)
    assert all(not part[off].any() for part in expected)
    for filler in (1.0, -1.0, math.nan, -math.inf):
        filled = {key: column.masked_fill(off, filler) if key in PER_TOKEN and key != "response_mask" else column for key, column in batch.items()}
        assert all(map(torch.equal, estimate(name, filled), expected))


@every_estimator
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_sample_without_a_finite_reward_changes_no_bit_of_the_others(name, broken):
    batch = two_interleaved_groups()
    others = [row for row in range(len(MASKS)) if row != 2]
    batch["token_level_rewards"][2, 0] = broken
    for whole, without in zip(estimate(name, batch), estimate(name, rows(batch, others)), strict=True):
        assert torch.equal(whole[others], without) and not whole[2].any()


@every_estimator
@pytest.mark.parametrize("per_token", [True, False])
def test_a_rejected_sample_changes_no_bit_of_the_others(name, per_token):
    batch = two_interleaved_groups()
    accept = torch.ones(len(MASKS), dtype=torch.long)
    accept[1] = 0
    if per_token:
        accept = accept[:, None].repeat(1, batch["response_mask"].shape[1])
    others = [row for row in range(len(MASKS)) if row != 1]
    for whole, without in zip(estimate(name, batch | {"accept": accept}), estimate(name, rows(batch, others)), strict=True):
        assert torch.equal(whole[others], without) and not whole[1].any()


@pytest.mark.parametrize("name", [name for name in GROUP if name != "gdpo"])
def test_statistics_over_all_samples_count_rejected_ones_but_train_none(name):
    batch = two_interleaved_groups() | {"accept": torch.tensor([1, 0, 1, 1, 1, 1, 1])}
    counted = estimate(name, batch, group_stats="all")[0]
    assert not counted[1].any() and not torch.equal(counted, estimate(name, batch)[0])
    if name not in ("grpo_passk", "reinforce_plus_plus_baseline"):  # the one credits another sample, the other whitens what is left
        everything = estimate(name, {key: column for key, column in batch.items() if key != "accept"})[0]
        assert torch.equal(counted[[0, 2, 3, 4, 5, 6]], everything[[0, 2, 3, 4, 5, 6]])


@every_estimator
def test_statistics_over_all_samples_still_leave_out_what_is_not_finite(name):
    batch = two_interleaved_groups()
    batch["token_level_rewards"][2, 0] = math.nan
    others = [0, 1, 3, 4, 5, 6]
    whole = estimate(name, batch, group_stats="all")[0]
    assert torch.equal(whole[others], estimate(name, rows(batch, others), group_stats="all")[0])


@every_estimator
def test_a_row_without_model_tokens_is_no_sample(name):
    batch = two_interleaved_groups()
    batch["response_mask"][4] = 0
    others = [0, 1, 2, 3, 5, 6]
    for stats in ("accepted", "all"):
        got = estimate(name, batch, group_stats=stats)[0]
        assert torch.equal(got[others], estimate(name, rows(batch, others), group_stats=stats)[0]) and not got[4].any()


@every_estimator
def test_one_token_answers_empty_answers_and_huge_rewards_are_finite(name):
    uids = ["A"] * 4
    for batch in (
        batch_of([[1]] * 4, [1, 0, 1, 0], uids),
        batch_of([[]] * 4, [1, 0, 1, 0], uids),
        batch_of([[0, 0]] * 4, [1, 0, 1, 0], uids),
        batch_of([[0], [0], [1], [0]], [1, 0, 1, 0], uids),
        batch_of([[1, 1]] * 4, [1e30, -1e30, 1e30, 0], uids),
        batch_of([[1, 1]] * 4, [1e-30, -1e-30, 0, 0], uids),
        batch_of([], [], []),
    ):
        for part in estimate(name, batch):
            assert part.shape == batch["response_mask"].shape and torch.isfinite(part).all()
            assert not part[batch["response_mask"] == 0].any()


@every_estimator
def test_a_wrong_tensor_as_the_mask_is_refused(name):
    batch = two_interleaved_groups()
    with pytest.raises(ValueError, match="response_mask holds only 0 and 1"):
        estimate(name, batch | {"response_mask": batch["values"]})
    with pytest.raises(ValueError, match="have one shape"):
        estimate(name, batch | {"response_mask": batch["response_mask"][:, :-1], "values": None} | {"values": batch["values"][:, :-1]})
    with pytest.raises(ValueError, match=r"got \{'session_ids': 3\} for 7 rows"):
        estimate(name, batch | {"session_ids": [0, 1, 2]})
    assert all(map(torch.equal, estimate(name, batch | {"response_mask": batch["response_mask"].bool()}), estimate(name, batch)))


@pytest.mark.parametrize(
    ("name", "column"),
    [("gae", "values"), ("remax", "reward_baselines"), *((f"{kind}optimal_token_baseline", "sum_pi_squared") for kind in ("", "tir_"))],
)
def test_a_column_that_is_not_finite_is_an_error_naming_the_row_unless_the_row_is_rejected(name, column):
    batch = two_interleaved_groups()
    batch[column][3] = math.nan
    with pytest.raises(ValueError, match=rf"{column} is finite on model tokens, got NaN or Inf in 1 rows such as \[3\]"):
        estimate(name, batch)
    others = [0, 1, 2, 4, 5, 6]
    got = estimate(name, batch | {"accept": torch.tensor([1, 1, 1, 0, 1, 1, 1])})[0]
    assert torch.equal(got[others], estimate(name, rows(batch, others))[0]) and not got[3].any()


@pytest.mark.parametrize("name", GROUP)
def test_group_estimators_ask_for_the_prompts(name):
    with pytest.raises(ValueError, match="got no index; pass the uid"):
        estimate(name, two_interleaved_groups() | {"index": None})


def test_whiten_leaves_the_scale_when_there_are_fewer_than_two_tokens(caplog):
    x, caplog.handler.level = torch.tensor([[3.0, math.nan, 5.0]]), logging.WARNING
    assert not whiten(x, torch.tensor([[0, 0, 0]])).any()
    assert not whiten(x * 1e30, torch.tensor([[1, 0, 0]])).any()
    assert len(caplog.records) == 2 and "at least two tokens" in caplog.text
    assert whiten(x, torch.tensor([[1, 0, 1]])).tolist() == [[pytest.approx(-math.sqrt(0.5)), 0, pytest.approx(math.sqrt(0.5))]]


def test_masked_var_is_unbiased_and_needs_two_entries():
    x = torch.tensor([[2.0, math.nan, 4.0]])
    assert masked_var(x, torch.tensor([[1, 0, 1]])) == 2
    for mask in ([[1, 0, 0]], [[0, 0, 0]]):
        with pytest.raises(ValueError, match="at least two entries"):
            masked_var(x, torch.tensor(mask))

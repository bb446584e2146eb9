import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import ProtocolError
from streamrl.protocol import tensors as T
from tests.protocol.batches import LENGTHS, batch, jagged, lists, quick, row_lists


@quick
@given(LENGTHS, st.data())
def test_index_select_moves_every_column(lengths, data):
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8))
    td = batch(lengths)
    for indices in (rows, torch.tensor(rows, dtype=torch.int64), np.array(rows, dtype=np.int32)):
        assert lists(T.index_select(td, indices)) == row_lists(td, rows)


def test_index_select_of_none_is_none():
    assert T.index_select(None, [0]) is None


@pytest.mark.parametrize("indices", [[2], [-1], torch.tensor([0, 5])])
def test_row_numbers_outside_the_batch_are_index_errors(indices):
    with pytest.raises(IndexError):
        T.index_select(batch([1, 2]), indices)


@pytest.mark.parametrize("indices", [[[0]], torch.zeros(1, 1, dtype=torch.int64), torch.tensor(0), [0.0], torch.tensor([True, False])])
def test_indices_are_a_list_of_integers(indices):
    with pytest.raises(ProtocolError):
        T.index_select(batch([1, 2]), indices)


@quick
@given(LENGTHS, st.integers(1, 4))
def test_chunk_then_concat_is_the_same_batch(lengths, chunks):
    td = batch(lengths * chunks)
    parts = T.chunk_tensordict(td, chunks)
    assert [part.batch_size[0] for part in parts] == [len(lengths)] * chunks
    T.assert_equal(T.concat_tensordict(parts), td)


def test_chunks_own_their_memory():
    td = T.get_tensordict({"x": torch.zeros(4, 2), "j": jagged([1, 2, 3, 4])})
    first = T.chunk_tensordict(td, 2)[0]
    assert first.get("x").untyped_storage().nbytes() == 2 * 2 * 4
    assert first.get("j").values().untyped_storage().nbytes() == 3 * 8
    assert first.get("x").is_contiguous()


@pytest.mark.parametrize("chunks", [4, 0, -1])
def test_chunks_are_equal(chunks):
    with pytest.raises(ProtocolError, match=f"10 rows for {chunks}"):
        T.chunk_tensordict(batch([1] * 10), chunks)


@quick
@given(LENGTHS, LENGTHS)
def test_concat_appends_rows_of_every_column(left, right):
    a, b = batch(left), batch(right)
    joined = lists(T.concat_tensordict([a, b]))
    for name, value in joined.items():
        expected = lists(a)[name] if name in ("epoch", "note") else lists(a)[name] + lists(b)[name]
        assert value == expected


@pytest.mark.parametrize(
    ("left", "right", "error"),
    [
        ({"x": [1]}, {"y": [1]}, ProtocolError),
        ({"x": jagged([2])}, {"x": torch.zeros(1, 2, dtype=torch.int64)}, ProtocolError),
        ({"x": [1]}, {"x": torch.zeros(1)}, ProtocolError),
        ({"x": torch.zeros(1)}, {"x": torch.zeros(1, dtype=torch.int64)}, TypeError),
        ({"x": torch.zeros(1, 2)}, {"x": torch.zeros(1, 3)}, ProtocolError),
    ],
)
def test_concat_refuses_parts_that_do_not_fit(left, right, error):
    with pytest.raises(error, match=r"'x'|\['x', 'y'\]"):
        T.concat_tensordict([T.get_tensordict(left), T.get_tensordict(right)])


def test_concat_needs_parts_and_equal_scalars():
    with pytest.raises(ProtocolError):
        T.concat_tensordict([])
    with pytest.raises(ProtocolError, match="'epoch'"):
        T.concat_tensordict([T.get_tensordict({"x": [1]}, {"epoch": 1}), T.get_tensordict({"x": [1]}, {"epoch": 2})])


def test_union_adds_columns_in_place_and_keeps_shared_ones():
    a, b = batch([2, 3]), T.get_tensordict({"responses": jagged([2, 3]), "new": [1, 2]}, {"extra": 1})
    assert T.union(a, b) is a
    assert T.get(a, "new") == [1, 2] and T.get(a, "extra") == 1


@pytest.mark.parametrize(
    "other",
    [
        {"new": [1, 2], "uid": ["u0", "x"]},
        {"new": [1]},
        {"new": [1, 2], "responses": jagged([3, 2])},
        {"score": torch.tensor([0.0, float("nan")])},
    ],
)
def test_a_refused_union_changes_nothing(other):
    a = batch([2, 3])
    with pytest.raises(ProtocolError):
        T.union(a, T.get_tensordict(other))
    T.assert_equal(a, batch([2, 3]))


def seen(td, **kw):
    return [part.get("score").int().tolist() for part in T.make_iterator(td, 2, 3, **kw)]


def test_iterator_yields_every_row_once_per_epoch_with_new_orders():
    td = batch([1] * 6)
    parts = seen(td, seed=1, dataloader_kwargs={"shuffle": True})
    assert len(parts) == 9
    epochs = [[row for part in parts[i : i + 3] for row in part] for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert epochs[0] != epochs[1] or epochs[1] != epochs[2]
    assert parts == seen(td, seed=1, dataloader_kwargs={"shuffle": True})
    assert seen(td) == [[0, 1], [2, 3], [4, 5]] * 3


def test_iterator_checks_its_arguments_at_once():
    with pytest.raises(ProtocolError, match="5 rows for mini_batch_size=2"):
        T.make_iterator(batch([1] * 5), 2, 1)
    with pytest.raises(TypeError):
        T.make_iterator(batch([1] * 4), 2, 1, dataloader_kwargs=["shuffle"])
    with pytest.raises(ProtocolError):
        T.make_iterator(batch([1] * 4), 0, 1)


@quick
@given(LENGTHS, st.integers(1, 17))
def test_pad_then_unpad_is_the_same_batch(lengths, divisor):
    td = batch(lengths)
    padded, pad = T.pad_to_divisor(td, divisor)
    assert padded.batch_size[0] % divisor == 0 and 0 <= pad < divisor
    assert lists(padded) == row_lists(td, [i % len(lengths) for i in range(len(lengths) + pad)])
    T.assert_equal(T.unpad(padded, pad), td)


def test_pad_and_unpad_refuse_what_cannot_be():
    with pytest.raises(ProtocolError):
        T.pad_to_divisor(batch([1]), 0)
    for pad in (-1, 3):
        with pytest.raises(ProtocolError):
            T.unpad(batch([1, 1]), pad)


def test_an_empty_batch_moves_like_any_other():
    empty = T.index_select(batch([2, 3]), [])
    assert empty.batch_size == (0,) and T.pad_to_divisor(empty, 4)[1] == 0
    T.assert_equal(T.concat_tensordict([empty, batch([2, 3])]), batch([2, 3]))
    assert list(T.make_iterator(empty, 2, 3)) == []
    T.assert_equal(T.chunk_tensordict(empty, 1)[0], empty)


@quick
@given(LENGTHS, st.integers(0, 6), st.integers(0, 6), st.integers(1, 3))
def test_slices_are_the_rows_between(lengths, start, stop, step):
    start, stop = min(start, len(lengths)), min(stop, len(lengths))
    td = batch(lengths)
    assert lists(T.slice_tensordict(td, start, stop, step)) == row_lists(td, range(start, stop, step))

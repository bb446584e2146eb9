"""DataProto: every row move takes all columns along."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import ProtocolError
from streamrl.protocol import DataProto
from streamrl.protocol import tensors as T
from streamrl.protocol.dataproto import DataProtoConfig, fold_batch_dim, pad_dataproto_to_divisor, unfold_batch_dim, unpad_dataproto
from tests.protocol.batches import components, jagged, quick
from tests.protocol.padded import SIZES, make, rows, snapshot


def test_an_int_gives_one_row():
    data = make(3, step=1)
    item = data[-1]
    assert item.batch["x"] == 2 and item.non_tensor_batch == {"uid": "u2", "chat": ["a", 2]} and item.meta_info is data.meta_info
    assert data[np.int64(0)].batch["x"] == 0
    for row in (3, -4):
        with pytest.raises(IndexError):
            data[row]


def test_slices_are_views_with_the_same_meta():
    data = make(5, step=1)
    part = data[1:4]
    assert rows(part) == [1, 2, 3] and part.meta_info is data.meta_info
    part.batch["w"][0, 0] = 4.0
    assert part.batch["w"].data_ptr() == data.batch["w"][1:].data_ptr()
    assert rows(data.slice(None, None, 2)) == [0, 2, 4] and rows(data[3:1]) == [] and rows(data[::-1]) == [4, 3, 2, 1, 0] and rows(data[-2:]) == [3, 4]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_lists_arrays_and_tensors_select_rows(kind):
    data = make(4, step=1)
    assert rows(data[kind([3, 0, 0, -1])]) == [3, 0, 0, 3]
    assert rows(data[kind([True, False, False, True])]) == [0, 3]
    assert rows(data.select_idxs([])) == [] and data[kind([1])].meta_info is data.meta_info


@pytest.mark.parametrize(
    ("index", "error"),
    [("x", TypeError), ((0, 1), TypeError), ([0.5], TypeError), ([4], IndexError), ([-5], IndexError), ([True], ProtocolError), ([[0]], ProtocolError)],
)
def test_other_indices_are_refused(index, error):
    with pytest.raises(error):
        make(4)[index]


def test_a_filter_moves_every_column():
    data = DataProto.from_dict({"r": torch.arange(6)}, {"reward": list(range(6)), "n": np.arange(6)})
    kept = data.select_idxs([0, 1, 4, 5])
    assert kept.batch["r"].tolist() == kept.non_tensor_batch["reward"].tolist() == kept.non_tensor_batch["n"].tolist() == [0, 1, 4, 5]


@quick
@given(st.permutations(list(range(6))))
def test_reorder_and_its_inverse_are_the_same_batch(order):
    data = make(6)
    data.reorder(torch.tensor(order))
    assert rows(data) == list(order)
    data.reorder(np.argsort(order))
    assert rows(data) == list(range(6))


@pytest.mark.parametrize("indices", [[0, 1], [0, 1, 1], [0, 1, 3], [[0, 1, 2]], [0.0, 1.0, 2.0]])
def test_reorder_takes_a_permutation_only(indices):
    data = make(3)
    with pytest.raises(ProtocolError):
        data.reorder(torch.tensor(indices))
    assert rows(data) == [0, 1, 2]


@quick
@given(SIZES, st.integers(1, 4))
def test_repeat_orders(size, times):
    data = make(size, step=1)
    assert rows(data.repeat(times)) == [i for i in range(size) for _ in range(times)]
    assert rows(data.repeat(times, interleave=False)) == list(range(size)) * times
    assert rows(data.sample_level_repeat([times] * size)) == rows(data.repeat(times))


@quick
@given(SIZES, st.integers(1, 4))
def test_split_then_concat_is_the_same_batch(size, part_size):
    data = make(size, step=1)
    parts = data.split(part_size)
    assert len(parts) == -(-size // part_size) and snapshot(DataProto.concat(parts)) == snapshot(data)


@quick
@given(SIZES, st.permutations(["x", "w"]))
def test_pop_then_union_is_the_same_batch(size, names):
    data = make(size, step=1)
    rest = data.pop(names[:1], ["chat"], ["step"])
    assert snapshot(data.union(rest)) == snapshot(make(size, step=1)) and rows(data) == list(range(size))


@quick
@given(st.integers(1, 4), st.integers(1, 4))
def test_fold_then_unfold_is_the_same_batch(outer, inner):
    data = make(outer * inner)
    assert snapshot(unfold_batch_dim(fold_batch_dim(data, outer))) == snapshot(data)


def test_repeat_needs_a_time():
    with pytest.raises(ProtocolError):
        make(2).repeat(0)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_sample_level_repeat(kind):
    assert rows(make(3).sample_level_repeat(kind([2, 0, 1]))) == [0, 0, 2]


@pytest.mark.parametrize("times", [[1, 2], [1, -1, 1], [[1, 1, 1]], "111", [1.5, 1, 1]])
def test_sample_level_repeat_refuses(times):
    with pytest.raises(ProtocolError):
        make(3).sample_level_repeat(times)


@quick
@given(SIZES, st.integers(1, 4))
def test_chunk_then_concat_is_the_same_batch(size, chunks):
    data = make(size * chunks, step=1)
    parts = data.chunk(chunks)
    assert [len(part) for part in parts] == [size] * chunks and all(part.meta_info is data.meta_info for part in parts)
    assert snapshot(DataProto.concat(parts)) == snapshot(data)


def test_uneven_chunks_need_padding_enabled():
    with pytest.raises(AssertionError, match="10 rows for 4 parts"):
        make(10).chunk(4)
    with pytest.raises(ProtocolError):
        make(10).chunk(0)
    parts = make(9, **{DataProtoConfig.auto_padding_key: True}).chunk(6)
    assert [rows(part) for part in parts] == [[0, 1], [2, 3], [4, 5], [6], [7], [8]]


def test_the_global_switch_enables_uneven_chunks(monkeypatch):
    monkeypatch.setattr(DataProtoConfig, "auto_padding", True)
    assert [len(part) for part in make(2).chunk(4)] == [1, 1, 0, 0]


def test_split_has_a_short_tail():
    assert [rows(part) for part in make(5).split(2)] == [[0, 1], [2, 3], [4]]
    with pytest.raises(ProtocolError):
        make(5).split(0)


def test_concat_flattens_metrics_and_unites_meta():
    parts = [make(1, metrics={"loss": 1}, a=1), make(1, metrics=None, b=float("nan")), make(1, metrics=[{"loss": 2}, {"loss": 3}], b=float("nan"))]
    meta = DataProto.concat(parts).meta_info
    assert meta["metrics"] == {"loss": [1, 2, 3]} and meta["a"] == 1 and set(meta) == {"metrics", "a", "b"}


@pytest.mark.parametrize(
    ("left", "right", "match"),
    [
        (make(1, a=1), make(1, a=2), "'a'"),
        (make(1), make(1).select(batch_keys=["x"]), "'w'"),
        (make(1), make(1).select(non_tensor_batch_keys=["uid"]), "'chat'"),
        (DataProto(None, {"a": np.zeros(1)}), DataProto.from_dict({"a": torch.zeros(1)}), "tensors"),
        (DataProto(None, {"a": np.zeros(1)}), DataProto(None, {"a": np.array(["x"], dtype=object)}), "'a'"),
        (DataProto(None, {"a": np.zeros((1, 2))}), DataProto(None, {"a": np.zeros((1, 3))}), "'a'"),
    ],
)
def test_concat_names_what_does_not_fit(left, right, match):
    with pytest.raises(ProtocolError, match=match):
        DataProto.concat([left, right])


def test_texts_of_other_widths_concatenate_and_numbers_of_other_widths_do_not():
    joined = DataProto.concat([DataProto(None, {"a": np.array(["x"])}), DataProto(None, {"a": np.array(["longer"])})])
    assert joined.non_tensor_batch["a"].tolist() == ["x", "longer"]
    with pytest.raises(TypeError, match="'a'"):
        DataProto.concat([DataProto(None, {"a": np.zeros(1, np.float32)}), DataProto(None, {"a": np.zeros(1)})])


def test_concat_needs_a_part_and_keeps_the_type_of_the_first():
    class Special(DataProto):
        pass

    with pytest.raises(ProtocolError):
        DataProto.concat([])
    special = Special(make(1).batch, make(1).non_tensor_batch)
    assert type(DataProto.concat([special, make(1)])) is Special
    assert type(special.repeat(2)) is type(special[0:1]) is type(special.chunk(1)[0]) is Special


def test_padding_appends_the_first_or_the_last_row():
    first, last = make(3), make(3)
    first.padding(2, "first")
    last.padding(1)
    assert rows(first) == [0, 1, 2, 0, 0] and rows(last) == [0, 1, 2, 2]
    with pytest.raises(ProtocolError):
        DataProto().padding(1)
    for arguments in ((-1,), (1, "middle")):
        with pytest.raises(ProtocolError):
            make(1).padding(*arguments)


@quick
@given(SIZES, st.integers(1, 20))
def test_pad_then_unpad_is_the_same_batch(size, divisor):
    padded, pad = pad_dataproto_to_divisor(make(size), divisor)
    assert len(padded) % divisor == 0 and rows(padded) == [i % size for i in range(size + pad)]
    assert rows(unpad_dataproto(padded, pad)) == list(range(size))


def test_padding_an_empty_batch_warns(caplog):
    data, pad = pad_dataproto_to_divisor(DataProto(), 4)
    assert pad == 0 and len(data) == 0 and "empty" in caplog.text
    with pytest.raises(ProtocolError):
        unpad_dataproto(make(1), 2)


def test_iterator_is_seeded_and_carries_the_meta():
    data = make(4, step=1)
    run = lambda: [rows(part) for part in data.make_iterator(2, 2, seed=3, dataloader_kwargs={"shuffle": True})]
    assert run() == run() and sorted([*run()[0], *run()[1]]) == [0, 1, 2, 3]
    assert next(data.make_iterator(4, 1)).meta_info is data.meta_info
    with pytest.raises(ProtocolError):
        data.make_iterator(3, 1)
    with pytest.raises(TypeError):
        data.make_iterator(2, 1, dataloader_kwargs=[1])


def test_a_jagged_batch_moves_like_a_dense_one():
    lengths = [2, 0, 3, 3]
    data = DataProto.from_dict({"r": jagged(lengths), "p": components(lengths), "x": torch.arange(4)})
    for moved, order in ((data.select_idxs([3, 1, 1]), [3, 1, 1]), (data[1:], [1, 2, 3]), (data.repeat(2), [0, 0, 1, 1, 2, 2, 3, 3]), (data[::2], [0, 2])):
        assert moved.batch["x"].tolist() == order
        for name in ("r", "p"):
            assert [row.tolist() for row in T.rows_of(moved.batch[name])] == [T.rows_of(data.batch[name])[i].tolist() for i in order]
        assert moved[0].batch["p"].shape == (3, lengths[order[0]])

"""DataProto: building, columns, looking and keeping. Row moves are in test_dataproto_rows.py."""

import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from streamrl.errors import MissingField, ProtocolError
from streamrl.protocol import DataProto
from streamrl.protocol import tensors as T
from streamrl.protocol.dataproto import fold_batch_dim, unfold_batch_dim
from tests.protocol.batches import jagged
from tests.protocol.padded import make, rows, snapshot

# -- building


def test_direct_constructor():
    data = DataProto(TensorDict({"x": torch.zeros(2, 3)}, batch_size=[2]), {"uid": np.array(["A", "B"], dtype=object)}, {"step": 1})
    assert len(data) == 2 and data.meta_info == {"step": 1}


def test_a_wrong_length_names_key_and_sizes():
    with pytest.raises(AssertionError, match=r"3 in 'uid' and 2 in 'batch'"):
        DataProto(TensorDict({"x": torch.zeros(2)}, batch_size=[2]), {"uid": np.array([1, 2, 3])})
    with pytest.raises(ValueError, match=r"1 in 'b' and 2 in 'a'"):
        DataProto(None, {"a": np.zeros(2), "b": np.zeros(1)})


@pytest.mark.parametrize("column", [[1, 2], np.array(3)])
def test_non_tensors_are_arrays_with_rows(column):
    with pytest.raises(ProtocolError, match="'uid'"):
        DataProto(None, {"uid": column})


def test_one_batch_dimension():
    with pytest.raises(ProtocolError, match=r"\(2, 3\)"):
        DataProto(TensorDict({"x": torch.zeros(2, 3)}, batch_size=[2, 3]))
    with pytest.raises(ProtocolError, match="num_batch_dims=2"):
        DataProto.from_dict({"x": torch.zeros(2, 3)}, num_batch_dims=2)


def test_len_of_every_kind_of_batch():
    assert len(make(3)) == 3 and len(DataProto(None, {"a": np.zeros(4)})) == 4 and len(DataProto()) == 0 and len(DataProto(meta_info={"a": 1})) == 0


def test_from_single_dict_sorts_by_type():
    data = DataProto.from_single_dict({"x": torch.zeros(2), "uid": np.array(["A", "B"], dtype=object)}, {"a": 1}, auto_padding=True)
    assert list(data.batch.keys()) == ["x"] and data.is_padding_enabled() and data.meta_info["a"] == 1
    with pytest.raises(ValueError, match="list"):
        DataProto.from_single_dict({"x": [1]})


def test_from_dict_keeps_lists_of_equal_length_and_the_callers_dicts():
    tensors, objects, meta = {"x": torch.zeros(2)}, {"chat": [[1, 2], [3, 4]], "empty": [[], {}]}, {"a": 1}
    data = DataProto.from_dict(tensors, objects, meta, auto_padding=True)
    assert data.non_tensor_batch["chat"].shape == (2,) and data.non_tensor_batch["chat"][0] == [1, 2]
    assert objects == {"chat": [[1, 2], [3, 4]], "empty": [[], {}]} and meta == {"a": 1} and list(tensors) == ["x"]


@pytest.mark.parametrize("arguments", [({"x": torch.zeros(2), "y": torch.zeros(3)},), ({"x": [1]},), (None, {"x": "text"}), ({"x": torch.tensor(1.0)},)])
def test_from_dict_refuses_what_has_no_rows(arguments):
    with pytest.raises(ProtocolError, match="'x'"):
        DataProto.from_dict(*arguments)


def test_rows_whose_lists_meet_equal_lengths_concatenate_with_others():
    one = DataProto.from_dict(non_tensors={"ids": [[1, 2, 3], [4, 5, 6]]})
    two = DataProto.from_dict(non_tensors={"ids": [[7, 8, 9], [1]]})
    joined = DataProto.concat([one, two]).non_tensor_batch["ids"]
    assert joined.shape == (4,) and joined.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1]]


def test_tensordict_and_back():
    data = make(2, step=3, names=["a", "b", "c"])
    td = data.to_tensordict()
    assert T.get(td, "chat") == [["a", 0], ["a", 1]] and T.get(td, "names") == ["a", "b", "c"]
    assert snapshot(DataProto.from_tensordict(td)) == snapshot(data)
    objects = DataProto.from_tensordict(T.get_tensordict({"uid": ["A"]}, {"a": 1}))
    assert objects.batch is None and len(objects) == 1


def test_a_name_in_two_places_is_refused():
    with pytest.raises(ProtocolError, match="'x'"):
        make(2, x=1).to_tensordict()
    with pytest.raises(ProtocolError, match="'a'"):
        DataProto.from_tensordict(T.get_tensordict({"x": [1]}, {"a": 1}), {"a": 2})


# -- columns


def test_select_takes_named_columns_and_names_missing_ones():
    data = make(2, a=1, b=2)
    part = data.select(["x"], ["uid"], ["a"])
    assert (list(part.batch.keys()), list(part.non_tensor_batch), part.meta_info) == (["x"], ["uid"], {"a": 1})
    assert part.batch["x"] is data.batch["x"] and snapshot(data.select()) == snapshot(data)
    copied = data.select(deepcopy=True)
    copied.non_tensor_batch["chat"][0].append("z")
    assert rows(data) == [0, 1] and copied.batch["x"].data_ptr() == data.batch["x"].data_ptr()
    for names in ({"batch_keys": ["q"]}, {"non_tensor_batch_keys": ["q"]}, {"meta_info_keys": ["q"]}):
        with pytest.raises(KeyError, match="q"):
            data.select(**names)


def test_pop_removes_all_or_nothing():
    data = make(2, a=1)
    with pytest.raises(MissingField):
        data.pop(["x"], ["uid"], ["nope"])
    assert snapshot(data) == snapshot(make(2, a=1))
    taken = data.pop(["x"], ["uid"], ["a"])
    assert (list(taken.batch.keys()), list(taken.non_tensor_batch), taken.meta_info) == (["x"], ["uid"], {"a": 1})
    assert (list(data.batch.keys()), list(data.non_tensor_batch), data.meta_info) == (["w"], ["chat"], {})
    assert data.pop().batch is None
    data.pop(["w"])
    assert len(data) == 2


def test_rename_takes_one_or_several_names_and_swaps():
    data = make(2)
    data.rename("x", "y")
    assert list(data.batch.keys()) == ["y", "w"]
    data.rename(["y", "w"], ["w", "y"])
    assert data.batch["w"].shape == (2,) and data.batch["y"].shape == (2, 4)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (("x",), ["y"], TypeError),
        ("x", 3, TypeError),
        (["x"], ["y", "z"], ValueError),
        ("q", "y", KeyError),
        ("x", "w", ProtocolError),
        (["x", "x"], ["a", "b"], ProtocolError),
        (["x", "w"], ["a", "a"], ProtocolError),
    ],
)
def test_rename_refuses(old, new, error):
    data = make(2)
    with pytest.raises(error):
        data.rename(old, new)
    assert list(data.batch.keys()) == ["x", "w"]


def test_union_adds_columns_and_returns_self():
    data = make(2, a=1)
    other = DataProto.from_dict({"x": torch.arange(2), "y": torch.zeros(2)}, {"uid": ["u0", "u1"], "z": [float("nan"), None]}, {"a": 1, "b": 2})
    assert data.union(other) is data
    assert set(data.batch.keys()) == {"x", "w", "y"} and data.meta_info == {"a": 1, "b": 2}
    again = DataProto.from_dict(non_tensors={"z": [float("nan"), None]})
    data.union(again)
    assert len(DataProto(meta_info={"c": 1}).union(data)) == 2
    assert len(data.union(DataProto(meta_info={"d": 1}))) == 2


def looped():
    chain = [1]
    chain.append(chain)
    return chain


def test_union_of_structures_that_contain_themselves_ends():
    make_one = lambda value: DataProto.from_dict(non_tensors={"loop": [value]})
    make_one(looped()).union(make_one(looped()))
    with pytest.raises(ProtocolError):
        make_one(looped()).union(make_one([1, [1, 2]]))


@pytest.mark.parametrize(
    "other",
    [
        DataProto.from_dict({"y": torch.zeros(3)}),
        DataProto.from_dict({"y": torch.zeros(2), "x": torch.tensor([0, 2])}),
        DataProto.from_dict({"y": torch.zeros(2), "w": torch.full((2, 4), float("nan"))}),
        DataProto.from_dict({"y": torch.zeros(2), "x": torch.tensor([0.0, 1.0])}),
        DataProto.from_dict({"y": torch.zeros(2)}, {"uid": ["u0", "other"]}),
        DataProto(None, {"uid": np.array(["u0", "u1"])}),
        DataProto(None, {"chat": np.array([["a", 0], ["a", 1]], dtype=object)}),
        DataProto.from_dict({"y": torch.zeros(2)}, meta_info={"a": 2}),
    ],
)
def test_a_refused_union_changes_nothing(other):
    data = make(2, a=1)
    with pytest.raises(AssertionError):
        data.union(other)
    assert snapshot(data) == snapshot(make(2, a=1))


def test_nan_tensors_are_not_equal_in_a_union():
    with pytest.raises(ProtocolError):
        DataProto.from_dict({"x": torch.tensor([float("nan")])}).union(DataProto.from_dict({"x": torch.tensor([float("nan")])}))


def test_jagged_columns_unite_by_offsets_and_values():
    make_one = lambda lengths: DataProto.from_dict({"r": jagged(lengths)})
    make_one([1, 2]).union(make_one([1, 2]))
    with pytest.raises(ProtocolError, match="row lengths"):
        make_one([1, 2]).union(make_one([2, 1]))
    assert T.lengths_of(make_one([1, 2, 3])[1:].batch["r"]).tolist() == [2, 3]


def test_fold_and_unfold():
    data = make(6, a=1)
    folded = fold_batch_dim(data, 2)
    assert folded.batch["w"].shape == (2, 3, 4) and folded.non_tensor_batch["uid"].shape == (2, 3) and len(folded) == 2
    assert snapshot(unfold_batch_dim(folded)) == snapshot(data)
    with pytest.raises(ProtocolError):
        fold_batch_dim(data, 4)
    with pytest.raises(ProtocolError):
        unfold_batch_dim(data)


def test_unfold_column_chunks():
    data = make(2, a=1)
    out = data.unfold_column_chunks(2, split_keys=["w"])
    assert out.batch["w"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert out.batch["x"].tolist() == [0, 0, 1, 1] and out.non_tensor_batch["uid"].tolist() == ["u0", "u0", "u1", "u1"]
    assert rows(data.unfold_column_chunks(2)) == [0, 0, 1, 1]
    for keys, error in ((["w"], ProtocolError), (["q"], KeyError), (["x"], ProtocolError)):
        with pytest.raises(error):
            data.unfold_column_chunks(3, keys)


def test_to_moves_tensors_only():
    data = make(2)
    assert data.to("cpu") is data and DataProto().to("cpu").batch is None


# -- looking and keeping


def test_print_size_logs_and_returns(caplog, capsys):
    caplog.set_level("INFO")
    text = make(2).print_size("actor")
    assert text.startswith("actor: 2 rows, tensors 48 bytes") and text in caplog.text and capsys.readouterr().out == ""
    assert "0 rows" in DataProto().print_size()


def test_data_info_describes_every_column():
    info = make(2, step=1).get_data_info()
    assert "batch x: dense shape=(2,)" in info and "non_tensor_batch uid: object rows=2 of str" in info and "['step']" in info
    assert "rows=0" in DataProto().get_data_info()


def test_disk_round_trip(tmp_path):
    data = make(3, step=1, nested={"a": [1, (2, 3)]})
    data.save_to_disk(tmp_path / "batch.bin")
    back = DataProto.load_from_disk(tmp_path / "batch.bin")
    assert snapshot(back) == snapshot(data) and rows(back) == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["batch.bin"]


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "batch.bin"
    make(1).save_to_disk(path)
    with pytest.raises(ProtocolError, match="object"):
        make(1, bad=object()).save_to_disk(path)
    assert rows(DataProto.load_from_disk(path)) == [0] and len(list(tmp_path.iterdir())) == 1


def test_foreign_and_damaged_files_are_protocol_errors(tmp_path):
    path = tmp_path / "batch.bin"
    make(2).save_to_disk(path)
    whole = path.read_bytes()
    for content in (b"", pickle.dumps({"a": 1}), whole[:-1], whole + b"x", whole[:40]):
        path.write_bytes(content)
        with pytest.raises(ProtocolError):
            DataProto.load_from_disk(path)


def test_every_damaged_byte_of_a_file_is_found(tmp_path):
    path = tmp_path / "batch.bin"
    make(2, note="x" * 20).save_to_disk(path)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ProtocolError, match=r"got .*; "):
            DataProto.load_from_disk(path)


def test_a_saved_slice_is_as_small_as_its_rows(tmp_path):
    data = DataProto.from_dict({"w": torch.zeros(1000, 100), "r": jagged([100] * 1000)})
    data[3:4].save_to_disk(tmp_path / "row.bin")
    assert (tmp_path / "row.bin").stat().st_size < 2500
    assert DataProto.load_from_disk(tmp_path / "row.bin").batch["w"].shape == (1, 100)


def test_pickling_ships_one_row_and_not_its_parent():
    data = DataProto.from_dict({"w": torch.zeros(1000, 100)}, {"uid": ["u"] * 1000}, {"a": 1})
    packed = pickle.dumps(data[3:4])
    assert len(packed) < 2000
    back = pickle.loads(packed)
    assert back.batch["w"].shape == (1, 100) and back.non_tensor_batch["uid"].tolist() == ["u"] and back.meta_info == {"a": 1}

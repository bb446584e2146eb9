import numpy as np
import pytest
import torch
from hypothesis import given
from tensordict import NonTensorData, NonTensorStack

from streamrl.errors import DtypeClash, ProtocolError
from streamrl.protocol import tensors as T
from streamrl.protocol.fields import TRAJECTORY_FIELDS, ColumnSpec
from tests.protocol.batches import LENGTHS, batch, components, jagged, quick, strided


def test_get_tensordict_takes_every_kind_of_column():
    dense = torch.zeros(2, 3)
    given_columns = {"x": dense, "j": jagged([2, 0]), "l": [["a"], ["b"]], "n": np.array([1, 2]), "s": T.object_stack([None, {}])}
    before = dict(given_columns)
    td = T.get_tensordict(given_columns, {"epoch": 1, "list": [1, 2, 3]})
    assert td.get("x") is dense and td.batch_size == (2,)
    assert T.get(td, "l") == [["a"], ["b"]] and T.get(td, "n") == [1, 2] and T.get(td, "s") == [None, {}]
    assert T.get(td, "epoch") == 1 and T.get(td, "list") == [1, 2, 3]
    assert isinstance(td.get("l"), NonTensorStack) and isinstance(td.get("list"), NonTensorData)
    assert given_columns == before


def test_nothing_at_all_has_no_row_axis():
    assert T.get_tensordict({}).batch_size == ()
    assert T.get(T.get_tensordict({}, {"a": 1}), "a") == 1


@pytest.mark.parametrize("size", [0, 1, 3])
def test_a_stack_holds_one_object_per_row(size):
    td = T.get_tensordict({"x": [[1, 2] for _ in range(size)]})
    assert td.batch_size == (size,) and T.get(td, "x") == [[1, 2]] * size


def test_unequal_batch_sizes_name_the_key():
    with pytest.raises(ProtocolError, match=r"2 in 'x' and 3 in 'uid'"):
        T.get_tensordict({"x": torch.zeros(2), "uid": ["a", "b", "c"]})


@pytest.mark.parametrize(
    "column",
    [
        [torch.zeros(1), torch.zeros(1)],
        torch.tensor(1.0),
        strided(),
        torch.nested.narrow(torch.ones(2, 4), 1, torch.tensor([0, 1]), torch.tensor([2, 2]), layout=torch.jagged),
        "text",
        {"a": 1},
        3,
        np.array(3),
    ],
)
def test_values_that_are_no_column_are_refused_by_name(column):
    with pytest.raises(ProtocolError, match="bad"):
        T.get_tensordict({"bad": column})


def test_a_name_is_a_column_or_a_scalar():
    with pytest.raises(ProtocolError, match="both"):
        T.get_tensordict({"x": [1]}, {"x": 1})


def test_known_fields_are_jagged_also_when_all_lengths_are_equal():
    rows = [{"responses": torch.arange(4), "rm_scores": torch.zeros(4), "position_ids": torch.zeros(3, 4, dtype=torch.int64)} for _ in range(6)]
    td = T.list_of_dict_to_tensordict(rows)
    assert T.lengths_of(td.get("responses")).tolist() == [4] * 6
    assert td.get("rm_scores").is_nested
    assert td.get("position_ids").shape[:2] == (6, 3)
    assert T.lengths_of(T.list_of_dict_to_tensordict(rows[:1]).get("position_ids")).tolist() == [4]


def test_scalar_rows_are_one_dense_column_with_their_dtype():
    rows = [{"reward": torch.tensor(0.5), "length": torch.tensor(3)}, {"reward": torch.tensor(1.0), "length": torch.tensor(7)}]
    td = T.list_of_dict_to_tensordict(rows)
    assert td.get("reward").tolist() == [0.5, 1.0] and td.get("length").tolist() == [3, 7]
    assert td.get("length").dtype == torch.int64 and td.get("reward").shape == (2,)
    assert T.list_of_dict_to_tensordict(rows[:1]).get("reward").shape == (1,)


def test_undeclared_columns_follow_their_shapes():
    rows = [
        {"same": torch.zeros(2, 3), "len": torch.zeros(1, 2), "uid": "A", "list": [1]},
        {"same": torch.ones(2, 3), "len": torch.zeros(1, 4), "uid": "B", "list": [2]},
    ]
    td = T.list_of_dict_to_tensordict(rows)
    assert td.get("same").shape == (2, 2, 3)
    assert T.lengths_of(td.get("len")).tolist() == [2, 4] and td.get("len").shape[:2] == (2, 1)
    assert T.get(td, "uid") == ["A", "B"] and T.get(td, "list") == [[1], [2]]


def test_a_declared_column_keeps_its_declaration():
    spec = {"x": ColumnSpec("float32", "ragged", -1), "s": ColumnSpec("int64", "scalar"), "d": ColumnSpec("int64", "dense", None, (2,))}
    row = {"x": torch.zeros(4, 5), "s": torch.tensor(1), "d": torch.tensor([1, 2])}
    td = T.list_of_dict_to_tensordict([row, row], spec)
    assert td.get("x").shape[:2] == (2, 4) and td.get("s").shape == (2,) and td.get("d").shape == (2, 2)


@pytest.mark.parametrize(
    ("row", "spec", "error"),
    [
        ({"x": torch.zeros(2, dtype=torch.float64)}, ColumnSpec("float32", "ragged", -1), DtypeClash),
        ({"x": torch.zeros(1)}, ColumnSpec("float32", "scalar"), ProtocolError),
        ({"x": torch.zeros(3)}, ColumnSpec("float32", "dense", None, (2,)), ProtocolError),
        ({"x": torch.tensor(1.0)}, ColumnSpec("float32", "ragged", -1), ProtocolError),
        ({"x": torch.zeros(3)}, ColumnSpec("object", "object"), ProtocolError),
    ],
)
def test_rows_against_their_declaration_are_refused(row, spec, error):
    with pytest.raises(error):
        T.list_of_dict_to_tensordict([row], {"x": spec})


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"x": 1}, {"x": 1, "y": 2}],
        [{"x": 1, "y": 2}, {"x": 1}],
        [{"x": torch.zeros(1)}, {"x": [0.0]}],
        [{"x": torch.zeros(1)}, {"x": torch.zeros(1, dtype=torch.int64)}],
        [{"x": torch.zeros(1, 2)}, {"x": torch.zeros(2, 3)}],
        [{"x": torch.zeros(2)}, {"x": torch.zeros(2, 2)}],
    ],
)
def test_rows_that_do_not_fit_each_other_are_refused(rows):
    with pytest.raises(ProtocolError):
        T.list_of_dict_to_tensordict(rows)


@quick
@given(LENGTHS)
def test_columns_of_trajectory_fields_have_their_declared_rank(lengths):
    td = T.list_of_dict_to_tensordict([{"responses": torch.arange(n), "num_turns": torch.tensor(2)} for n in lengths], TRAJECTORY_FIELDS)
    assert T.lengths_of(td.get("responses")).tolist() == lengths and td.get("num_turns").shape == (len(lengths),)


def test_assign_non_tensor_checks_the_length_before_it_writes():
    td = batch([2, 3])
    T.assign_non_tensor(td, a=["x", "y"], b={"k": 1})
    assert T.get(td, "a") == ["x", "y"] and T.get(td, "b") == {"k": 1}
    with pytest.raises(ProtocolError, match="'d'"):
        T.assign_non_tensor(td, c=1, d=["x"])
    assert "c" not in td.keys()


def test_get_and_pop_unwrap_and_fall_back():
    td = batch([1, 2])
    assert T.get(td, "missing", 7) == 7 and T.pop(td, "missing") is None
    assert T.pop(td, "uid") == ["u0", "u1"] and "uid" not in td.keys()
    assert T.pop(td, "note") == [1, 2, 3]
    assert T.pop(td, "responses").is_nested


def test_get_keys_and_pop_keys_take_sub_batches():
    td = batch([1, 2])
    assert set(T.get_keys(td, ["uid", "epoch"]).keys()) == {"uid", "epoch"}
    with pytest.raises(KeyError, match="nope"):
        T.pop_keys(td, ["uid", "nope"])
    assert "uid" in td.keys()
    sub = T.pop_keys(td, ["uid", "position_ids"])
    assert "uid" not in td.keys() and sub.get("position_ids").shape[:2] == (2, 3)


def test_describe_is_one_line_for_every_kind():
    assert T.describe("r", jagged([3, 5])) == "r: jagged rows=2 lengths=[3, 5] torch.int64 cpu"
    assert T.describe("p", components([2])) == "p: jagged rows=1 lengths=[2] torch.int64 cpu"
    assert T.describe("x", torch.zeros(2, 3)) == "x: dense shape=(2, 3) torch.float32 cpu"
    assert T.describe("u", ["a", 1]) == "u: object rows=2 of int or str"
    assert T.describe("u", T.object_stack([[1]])) == "u: object rows=1 of list"
    assert T.describe("n", np.zeros((2, 2))) == "n: array shape=(2, 2) float64"
    assert T.describe("s", NonTensorData(3)) == "s: batch-less int"
    assert "min=1 max=1 sum=40" in T.describe("r", jagged([1] * 40))


def test_assert_equal_names_the_column():
    T.assert_equal(batch([1, 0]), batch([1, 0]))
    changes = {
        "responses": jagged([0, 1]),
        "score": torch.tensor([0.0, 2.0]),
        "wide": torch.zeros(2, 2),
        "uid": T.object_stack(["u0", "x"]),
        "epoch": NonTensorData(4),
        "position_ids": jagged([1, 0]),
    }
    for name, value in changes.items():
        other = batch([1, 0])
        other.set(name, value)
        with pytest.raises(ProtocolError, match=name):
            T.assert_equal(batch([1, 0]), other)
    with pytest.raises(ProtocolError, match="columns"):
        T.assert_equal(batch([1]), T.get_keys(batch([1]), ["uid"]))
    with pytest.raises(ProtocolError, match="rows"):
        T.assert_equal(batch([1]), batch([1, 1]))


def test_nan_differs_in_tensors_and_equals_itself_in_objects():
    nan = float("nan")
    T.assert_equal(T.get_tensordict({"x": [nan, {"a": nan}]}), T.get_tensordict({"x": [float("nan"), {"a": nan}]}))
    with pytest.raises(ProtocolError):
        T.assert_equal(T.get_tensordict({"x": torch.tensor([nan])}), T.get_tensordict({"x": torch.tensor([nan])}))

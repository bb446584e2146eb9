import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import ProtocolError
from streamrl.protocol import tensors as T
from streamrl.protocol.codec import decode, encode
from streamrl.protocol.equality import deep_equal
from streamrl.protocol.tensors.jagged import ragged_axis
from tests.protocol.batches import LENGTHS, batch, components, quick

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=12,
)
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


@quick
@given(PLAIN)
def test_plain_values_come_back_equal_with_their_types(value):
    assert deep_equal(decode(encode(value)), value)


@quick
@given(LENGTHS)
def test_batches_come_back_equal(lengths):
    T.assert_equal(decode(encode(batch(lengths))), batch(lengths))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3,), (2, 3)])
def test_every_dtype_and_shape(dtype, shape):
    x = torch.ones(shape).to(dtype)
    back = decode(encode({"x": x}))["x"]
    assert back.dtype == dtype and back.shape == x.shape and torch.equal(back, x)
    back.zero_()  # it owns writable memory


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.zeros((0, 2)),
        np.array(["a", "bcd"]),
        np.array([b"x"]),
        np.float32(1.5),
        np.array(True),
        np.array(["2020-01-01"], "M8[D]"),
        np.arange(6)[::2],
        np.array([""]),
    ],
)
def test_arrays_keep_dtype_and_shape(array):
    back = decode(encode([array]))[0]
    assert type(back) is type(array) and back.dtype == array.dtype and back.shape == array.shape and np.array_equal(back, array)


def test_object_arrays_keep_rows_and_shape():
    array = T.object_array([[1, 2], [3, 4], None, {"a": (1, np.int64(2), torch.ones(2))}])
    assert deep_equal(decode(encode(array)), array)
    assert decode(encode(array.reshape(2, 2))).shape == (2, 2)


def test_tool_schemas_do_not_leak_into_each_other():
    schemas = [{"type": "object", "properties": {"city": {"type": "string"}}}, {"type": "object", "properties": {"a": {"type": "int"}, "b": {"type": "int"}}}]
    td = T.get_tensordict({"tools": copy.deepcopy(schemas)})
    assert T.get(decode(encode(td)), "tools") == schemas


def test_views_are_written_compactly():
    column = torch.zeros(1000, 100)
    assert len(encode(column[5:6])) < 600 and len(encode(column.T[0:1])) < 4400
    td = T.get_tensordict({"j": T.nested_from_list([torch.zeros(100)] * 100)})
    assert len(encode(T.slice_tensordict(td, 3, 4))) < 700
    assert torch.equal(decode(encode(column.T[:2])), column.T[:2])


def test_multi_component_columns_keep_their_ragged_axis():
    td = decode(encode(T.get_tensordict({"p": components([5, 5], 4)})))
    assert td.get("p").shape[:2] == (2, 4)


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: 0, 2**64, {(1, 2): 3}, torch.ones(2).to_sparse(), np.zeros(1, dtype=[("a", "i4")]), "\ud800", T])
def test_what_cannot_come_back_equal_is_refused(value):
    with pytest.raises(ProtocolError):
        encode({"x": value})


def test_a_structure_that_contains_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(ProtocolError):
        encode(loop)


def test_a_pickle_is_never_run():
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("code was run",))

    with pytest.raises(ProtocolError):
        decode(pickle.dumps(Bomb()))


@quick
@given(st.integers(0, 400), st.integers(1, 255))
def test_a_flipped_byte_gives_a_protocol_error_or_other_data_and_nothing_else(place, flip):
    data = bytearray(encode(batch([2, 0, 3])))
    data[place % len(data)] ^= flip
    try:
        decode(bytes(data))
    except ProtocolError:
        pass


@quick
@given(st.binary(max_size=60))
def test_noise_is_a_protocol_error(noise):
    with pytest.raises(ProtocolError):
        decode(noise)


def test_a_cut_file_is_a_protocol_error():
    data = encode(batch([2, 3]))
    for cut in range(0, len(data), 37):
        with pytest.raises(ProtocolError):
            decode(data[:cut])


@quick
@given(st.integers(1, 4), st.integers(0, 4), st.sampled_from(DTYPES))
def test_equal_lengths_single_rows_and_every_dtype_keep_their_ragged_axis(size, length, dtype):
    columns = {
        "flat": T.nested_from_list([torch.ones(length).to(dtype)] * size),
        "last": T.nested_from_list([torch.ones(3, length).to(dtype)] * size),
        "first": T.nested_from_list([torch.ones(length, 3).to(dtype)] * size, 0),
    }
    back = decode(encode(T.get_tensordict(columns)))
    T.assert_equal(back, T.get_tensordict(columns))
    assert [ragged_axis(back.get(name)) for name in columns] == [1, 2, 1] and back.get("last").shape[1] == 3


@quick
@given(st.lists(st.lists(st.integers(0, 3), max_size=3) | st.sampled_from([None, np.float32(0.5), np.arange(3), np.array(["a", "bc"])]), max_size=5))
def test_objects_with_numpy_values_come_back_with_their_types(values):
    rows = [{"value": value, "nested": [value, (value,)]} for value in values]
    assert deep_equal(T.get(decode(encode(T.get_tensordict({"x": rows}))), "x"), rows)


def test_an_empty_batch_keeps_its_columns():
    empty = T.index_select(batch([2, 3]), [])
    T.assert_equal(decode(encode(empty)), empty)

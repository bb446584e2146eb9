import pytest
import torch
from hypothesis import given

from streamrl.errors import DtypeClash, ProtocolError
from streamrl.protocol import tensors as T
from streamrl.protocol.tensors import jagged as J
from tests.protocol.batches import LENGTHS, components, jagged, quick, strided


def test_equal_lengths_are_still_jagged():
    x = jagged([4, 4, 4])
    assert x.is_nested and x.offsets().tolist() == [0, 4, 8, 12]


def test_two_rows_of_4_by_5_are_ragged_in_their_last_axis():
    x = T.nested_from_list([torch.ones(4, 5), torch.zeros(4, 5)])
    assert J.ragged_axis(x) == 2 and x.shape[:2] == (2, 4)
    assert [tuple(row.shape) for row in T.rows_of(x)] == [(4, 5), (4, 5)]
    assert torch.equal(T.rows_of(x)[0], torch.ones(4, 5))


def test_the_first_axis_of_a_row_can_be_ragged():
    x = T.nested_from_list([torch.ones(2, 4), torch.ones(3, 4)], ragged_dim=0)
    assert J.ragged_axis(x) == 1 and T.lengths_of(x).tolist() == [2, 3]


@quick
@given(LENGTHS)
def test_rows_come_back_as_they_went_in(lengths):
    rows = list(torch.arange(sum(lengths)).split(lengths))
    x = T.nested_from_list(rows)
    assert T.lengths_of(x).tolist() == lengths
    assert all(torch.equal(a, b) for a, b in zip(rows, T.rows_of(x), strict=True))
    assert [tuple(row.shape) for row in T.rows_of(components(lengths))] == [(3, n) for n in lengths]


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([], ProtocolError),
        ([torch.tensor(1.0)], ProtocolError),
        ([torch.ones(2), torch.ones(2, dtype=torch.int64)], DtypeClash),
        ([torch.ones(3, 2), torch.ones(4, 2)], ProtocolError),
        ([torch.ones(3), torch.ones(3, 2)], ProtocolError),
    ],
)
def test_rows_that_make_no_column_are_refused(rows, error):
    with pytest.raises(error):
        T.nested_from_list(rows)


def test_a_ragged_axis_outside_the_row_is_refused():
    with pytest.raises(ProtocolError, match="ragged_dim=1"):
        T.nested_from_list([torch.ones(3)], ragged_dim=1)


@quick
@given(LENGTHS, LENGTHS)
def test_concat_appends_rows_and_keeps_the_ragged_axis(left, right):
    for make in (jagged, components):
        joined = T.concat_nested([make(left), make(right)])
        rows = T.rows_of(make(left)) + T.rows_of(make(right))
        assert J.ragged_axis(joined) == J.ragged_axis(make(left))
        assert all(torch.equal(a, b) for a, b in zip(T.rows_of(joined), rows, strict=True))


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [torch.ones(2, 3)],
        [jagged([2]), torch.ones(1, 2)],
        [strided()],
        [jagged([2]), components([2])],
        [components([2], 3), components([2], 4)],
        [T.nested_from_list([torch.ones(2, 3)]), T.nested_from_list([torch.ones(2, 3)], ragged_dim=0)],
        [torch.nested.narrow(torch.ones(2, 4), 1, torch.tensor([0, 1]), torch.tensor([2, 2]), layout=torch.jagged)],
    ],
)
def test_parts_that_make_no_column_are_refused(parts):
    with pytest.raises(ProtocolError):
        T.concat_nested(parts)


def test_concat_of_two_dtypes_is_a_type_error():
    with pytest.raises(TypeError, match="float32"):
        T.concat_nested([jagged([2]), jagged([2], torch.float32)])


@quick
@given(LENGTHS)
def test_selected_and_sliced_rows_are_those_rows(lengths):
    for x in (jagged(lengths), components(lengths)):
        order = [i % len(lengths) for i in range(len(lengths) - 1, -3, -1)]
        picked = J.select_rows(x, torch.tensor(order))
        assert all(torch.equal(T.rows_of(picked)[k], T.rows_of(x)[i]) for k, i in enumerate(order))
        part = J.slice_rows(x, 1, len(lengths)) if len(lengths) > 1 else x
        assert torch.equal(T.rows_of(part)[-1], T.rows_of(x)[-1])


def test_a_column_without_rows_keeps_its_kind():
    empty = J.select_rows(jagged([2, 3]), torch.zeros(0, dtype=torch.int64))
    assert empty.is_nested and empty.shape[0] == 0
    assert T.lengths_of(T.concat_nested([empty, jagged([2])])).tolist() == [2]


def test_gradients_pass_through_row_moves():
    values = torch.arange(5.0, requires_grad=True)
    x = J.from_parts(values * 2, torch.tensor([0, 2, 5]))
    J.select_rows(x, torch.tensor([1, 1])).values().sum().backward()
    assert values.grad.tolist() == [0, 0, 4, 4, 4]

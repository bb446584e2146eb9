"""Building and reading the columns of a TensorDict.

Four kinds of column exist: dense tensors, jagged tensors, object stacks (``NonTensorStack``: one Python object per row) and batch-less
scalars (``NonTensorData``: one value for the whole batch). A kind is chosen by declaration or by type, never by what lengths happen to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_tensor_collection
from torch import Tensor

from streamrl.errors import DtypeClash, MissingField, ProtocolError
from streamrl.protocol.fields import TRAJECTORY_FIELDS, ColumnSpec
from streamrl.protocol.tensors.jagged import check_jagged, join_rows


def object_stack(values: Iterable[Any]) -> NonTensorStack:
    """One Python object per row; lists of equal length stay lists."""
    return NonTensorStack(*[NonTensorData(value) if is_tensor_collection(value) else value for value in values])


def stack_rows(column: NonTensorStack) -> list[NonTensorData]:
    """The rows of an object column in their wrapping, which another stack can take over."""
    return list(column.tensordicts) if column.stack_dim == 0 else list(column.unbind(0))


def object_array(values: Iterable[Any]) -> np.ndarray:
    """A 1-D object array with one element per row; rows that are lists of equal length do not become a second axis."""
    rows = list(values)
    array = np.empty(len(rows), dtype=object)
    for i, row in enumerate(rows):
        array[i] = row
    return array


def array_rows(array: np.ndarray) -> list[Any]:
    """The rows of an array: plain Python values of a 1-D array, sub-arrays otherwise."""
    return array.tolist() if array.ndim == 1 else list(array)


def is_stack(column: Any) -> bool:
    """True for an object column."""
    return isinstance(column, NonTensorStack)


def is_scalar(column: Any) -> bool:
    """True for a value of the whole batch."""
    return isinstance(column, NonTensorData)


def num_rows(td: TensorDict) -> int | None:
    """Rows of a batch; None when it has only batch-less entries and therefore no row axis."""
    return int(td.batch_size[0]) if len(td.batch_size) else None


def columns_of(td: TensorDict) -> dict[str, Any]:
    """Name -> column, wrapped as it is stored."""
    return {str(name): td.get(name) for name in td.keys()}


def build(columns: Mapping[str, Any], rows: int | None) -> TensorDict:
    """A TensorDict of ready columns; ``rows`` is None when there is no row axis."""
    td: Any = TensorDict({}, batch_size=[] if rows is None else [rows])
    for name, column in columns.items():
        td.set(name, NonTensorData(column.data) if is_scalar(column) else column)  # a scalar remembers the size of its old batch
    return td


def get_tensordict(tensor_dict: Mapping[str, Any], non_tensor_dict: Mapping[str, Any] | None = None) -> TensorDict:
    """A batch of ``tensor_dict``'s columns (tensors, lists, arrays, stacks) and ``non_tensor_dict``'s batch-less values.

    >>> td = get_tensordict({"x": torch.zeros(2, 3), "uid": ["A", "B"]}, {"epoch": 1})
    >>> td.batch_size, get(td, "uid"), get(td, "epoch")
    (torch.Size([2]), ['A', 'B'], 1)
    """
    scalars = dict(non_tensor_dict or {})
    both = sorted(scalars.keys() & tensor_dict.keys())
    if both:
        raise ProtocolError(f"a name is a column or a batch-less value, got both for {both}; rename one of them")
    columns = {name: _as_column(name, value) for name, value in tensor_dict.items()}
    rows = _common_rows(columns)
    return build(columns | {name: NonTensorData(value) for name, value in scalars.items()}, rows)


def _as_column(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.is_nested:
            check_jagged(value, repr(name))
        elif value.dim() == 0:
            raise ProtocolError(f"a column has a row axis, got a tensor of rank 0 for {name!r}; pass it in non_tensor_dict as a number")
        return value
    if is_stack(value):
        return value
    if isinstance(value, np.ndarray) and value.ndim:
        return object_stack(array_rows(value))
    if isinstance(value, list):
        if any(isinstance(item, Tensor) for item in value):
            raise ProtocolError(f"a list column holds Python objects, got a tensor inside {name!r}; stack the rows or use nested_from_list")
        return object_stack(value)
    raise ProtocolError(
        f"a column is a tensor, list, array or object stack, got {type(value).__name__} for {name!r}; batch-less values go into non_tensor_dict"
    )


def _common_rows(columns: Mapping[str, Any]) -> int | None:
    sizes = {name: int(column.shape[0]) for name, column in columns.items()}
    first = next(iter(sizes), None)
    if first is None:
        return None
    for name, size in sizes.items():
        if size != sizes[first]:
            raise ProtocolError(
                f"columns of a batch have one number of rows, got {sizes[first]} in {first!r} and {size} in {name!r}; drop or repeat rows first"
            )
    return sizes[first]


def list_of_dict_to_tensordict(rows: Sequence[Mapping[str, Any]], spec: Mapping[str, ColumnSpec] | None = None) -> TensorDict:
    """Rows as columns. ``spec`` declares kind and dtype of a column; without it the known trajectory fields keep their declared layout.

    A column without declaration is stacked when all shapes are equal and jagged when one axis differs. Rank 0 gives a column of shape (B,).
    """
    if not rows:
        raise ProtocolError("list_of_dict_to_tensordict takes at least one row, got none; skip the call when the batch is empty")
    names = rows[0].keys()
    for i, row in enumerate(rows):
        if row.keys() != names:
            raise ProtocolError(f"rows of a batch have one set of keys, got {sorted(row.keys() ^ names)} in only one of row 0 and row {i}; fill or drop them")
    columns = {name: _column_of_rows(name, [row[name] for row in rows], spec) for name in names}
    return build(columns, len(rows))


def _column_of_rows(name: str, values: list[Any], spec: Mapping[str, ColumnSpec] | None) -> Any:
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors:
        return object_stack(values)
    if len(tensors) != len(values):
        other = next(type(value).__name__ for value in values if not isinstance(value, Tensor))
        raise ProtocolError(f"a column holds tensors or objects, got both (Tensor and {other}) in {name!r}; convert the rows first")
    if spec is not None and name in spec:
        return _declared(name, tensors, spec[name])
    known = TRAJECTORY_FIELDS.get(name)
    if known is not None and known.kind == "ragged" and tensors[0].dim():
        return join_rows(repr(name), tensors, -1 if known.ragged_dim is None else known.ragged_dim)
    return _by_shape(name, tensors)


def _declared(name: str, tensors: list[Tensor], spec: ColumnSpec) -> Any:
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    if spec.kind == "object":
        raise ProtocolError(f"{name!r} is declared an object column, got tensors; pass plain values")
    if dtype != spec.dtype:
        raise DtypeClash(f"{name!r} is declared {spec.dtype}, got {dtype}; convert the rows first")
    if spec.kind == "ragged":
        return join_rows(repr(name), tensors, -1 if spec.ragged_dim is None else spec.ragged_dim)
    expected = () if spec.kind == "scalar" else spec.inner_shape
    for i, row in enumerate(tensors):
        if tuple(row.shape) != expected:
            raise ProtocolError(f"a row of {name!r} is declared to have shape {expected}, got {tuple(row.shape)} in row {i}; reshape it or declare it ragged")
    return _stacked(name, tensors)


def _by_shape(name: str, tensors: list[Tensor]) -> Tensor:
    shapes = sorted({tuple(t.shape) for t in tensors})
    if len(shapes) == 1:
        return _stacked(name, tensors)
    ranks = {len(shape) for shape in shapes}
    free = [axis for axis in range(min(ranks)) if len({shape[axis] for shape in shapes}) > 1]
    if len(ranks) > 1 or len(free) != 1:
        raise ProtocolError(f"rows of one column differ along one axis at most, got shapes {shapes[:4]} in {name!r}; pad them or declare objects")
    return join_rows(repr(name), tensors, free[0])


def _stacked(name: str, tensors: list[Tensor]) -> Tensor:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise DtypeClash(f"rows of {name!r} have one dtype, got {sorted(map(str, dtypes))}; convert them first")
    return torch.stack(tensors)


def assign_non_tensor(td: Any, **values: Any) -> TensorDict:
    """Set object columns (lists, one element per row) and batch-less values (anything else) in place."""
    rows = num_rows(td)
    for name, value in values.items():
        if isinstance(value, list) and len(value) != rows:
            raise ProtocolError(f"an object column has one element per row, got {len(value)} for {rows} rows in {name!r}; wrap a batch-less list in a tuple")
    for name, value in values.items():
        td.set(name, object_stack(value) if isinstance(value, list) else NonTensorData(value))
    return td


def unwrap(column: Any) -> Any:
    """A stack as a list, a scalar as its value, a tensor as it is."""
    if is_stack(column):
        return column.tolist()
    return column.data if is_scalar(column) else column


def get(td: TensorDict, key: str, default: Any = None) -> Any:
    """The unwrapped column, or ``default`` when the batch has none of this name."""
    return unwrap(td.get(key)) if key in td.keys() else default


def pop(td: TensorDict, key: str, default: Any = None) -> Any:
    """Like :func:`get`, and the column is removed."""
    value = get(td, key, default)
    if key in td.keys():
        td.del_(key)
    return value


def get_keys(td: TensorDict, keys: Iterable[str]) -> TensorDict:
    """A batch of the columns ``keys``, on the same memory."""
    names = list(keys)
    columns = columns_of(td)
    require(columns, names)
    return build({name: columns[name] for name in names}, num_rows(td))


def pop_keys(td: TensorDict, keys: Iterable[str]) -> TensorDict:
    """Like :func:`get_keys`, and the columns are removed; nothing is removed when one is missing."""
    taken = get_keys(td, keys)
    for name in columns_of(taken):
        td.del_(name)
    return taken


def require(present: Iterable[str], names: Iterable[str]) -> None:
    """MissingField (a KeyError) that lists the names that are not there."""
    have = set(present)
    missing = [name for name in names if name not in have]
    if missing:
        raise MissingField(f"the batch has the columns {sorted(have)}, got a request for {missing}; check the names")

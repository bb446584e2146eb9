"""Values to bytes and back. A column's kind is decided here, once, by what is put and never by the lengths in one batch:

| given                                             | kind                                                       |
| a known trajectory field                          | its declared kind and dtype, whatever container            |
| array or tensor (B,)                              | scalar                                                     |
| array or tensor (B, *inner)                       | dense                                                      |
| jagged nested tensor                              | ragged, with its ragged axis                               |
| list of arrays or tensors of rank >= 1            | ragged, last axis (a known field: its declared axis)       |
| list of 0-d arrays, 0-d tensors or NumPy scalars  | scalar                                                     |
| any other list                                    | object                                                     |

Values are never cast. Torch is touched only when a tensor is given or asked for, so processes without torch can write and read.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from streamrl.dataplane import jagged
from streamrl.dataplane.objects import decode_object, encode_object
from streamrl.errors import DtypeClash, ProtocolError
from streamrl.protocol.fields import OBJECT, TRAJECTORY_FIELDS, ColumnSpec, Kind
from streamrl.protocol.segments import LocatedColumn

# Tensor dtypes that NumPy lacks, with the NumPy dtype that carries their bytes.
RAW_DTYPES: dict[str, np.dtype] = {"bfloat16": np.dtype(np.uint16), "float8_e4m3fn": np.dtype(np.uint8), "float8_e5m2": np.dtype(np.uint8)}
_DTYPES = frozenset("bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64 complex64 complex128".split())


class EncodedColumn:
    """A column ready to be copied into a segment: ``chunks`` are 1-D arrays of one dtype whose concatenation is the rows back to back."""

    __slots__ = ("chunks", "lengths", "name", "num_bytes", "spec")

    def __init__(self, name: str, spec: ColumnSpec, lengths: list[int], chunks: list[np.ndarray]) -> None:
        self.name, self.spec, self.lengths, self.chunks = name, spec, lengths, chunks
        self.num_bytes = chunks[0].nbytes if len(chunks) == 1 else sum(chunk.nbytes for chunk in chunks)


class EncodedColumns(list[EncodedColumn]):
    """The columns of a put that were validated already."""


def storage_dtype(name: str) -> np.dtype:
    """The NumPy dtype that carries a column's bytes."""
    return RAW_DTYPES[name] if name in RAW_DTYPES else np.dtype(name)


def unit_bytes(spec: ColumnSpec) -> int:
    """Bytes of one row (scalar, dense), of one entry of the free axis (ragged), or 1 (object)."""
    return 1 if spec.kind == "object" else _item_bytes(spec.dtype) * math.prod(spec.inner_shape)


@functools.lru_cache(maxsize=64)
def _item_bytes(dtype: str) -> int:
    return storage_dtype(dtype).itemsize


# ---- encoding ---------------------------------------------------------------------------------------------------------------------------


def encode_columns(fields: Any, num_rows: int) -> list[EncodedColumn]:
    """All columns of a put, validated. Nothing is written, so an error leaves the store as it was."""
    if isinstance(fields, EncodedColumns):
        return fields
    return [encode_column(name, values, num_rows) for name, values in _items(fields, num_rows)]


def encode_column(name: str, values: Any, num_rows: int) -> EncodedColumn:
    """One column; DtypeClash or ProtocolError names it."""
    if not isinstance(name, str) or not name:
        raise ProtocolError(f"columns have names, got {name!r}; use a non-empty str")
    if _is_nested(values):
        column = _from_nested(name, values)
    elif _is_tensor(values) or (isinstance(values, np.ndarray) and values.dtype != object):
        column = _from_batch(name, *_bytes_of(name, values))
    elif isinstance(values, (list, tuple, np.ndarray)):
        column = _from_list(name, list(values))
    else:
        raise DtypeClash(f"a column is a tensor, an array or a list with one value per row, got {type(values).__name__} for {name!r}; wrap it in a list")
    if len(column.lengths) != num_rows:
        raise ProtocolError(f"a column has one value per key, got {len(column.lengths)} values of {name!r} for {num_rows} keys; pass them together")
    return column


def encode_row(fields: Any) -> EncodedColumns:
    """The fields of a single row as columns of length 1: tensors and arrays get a batch dimension, everything else becomes an object."""
    if type(fields) is not dict:
        tensordict = sys.modules.get("tensordict")
        if tensordict is not None and tensordict.is_tensor_collection(fields):
            return EncodedColumns(encode_columns(fields.unsqueeze(0) if not fields.batch_size else fields, 1))
        if not isinstance(fields, Mapping):
            raise ProtocolError(f"fields of a row are a mapping, got {type(fields).__name__}; pass name -> value")
    return EncodedColumns([_encode_value(name, value) for name, value in fields.items()])


def _encode_value(name: str, value: Any) -> EncodedColumn:
    if _is_nested(value):
        raise ProtocolError(f"a row's value is one tensor, got a nested tensor for {name!r}; use kv_batch_put for several rows")
    if not isinstance(name, str) or not name or not (_is_tensor(value) or (isinstance(value, np.ndarray) and value.dtype != object)):
        return encode_column(name, [value], 1)
    dtype, array = _bytes_of(name, value)
    if name in TRAJECTORY_FIELDS:
        return _from_batch(name, dtype, array[None])
    return EncodedColumn(name, ColumnSpec(dtype, "dense" if array.ndim else "scalar", None, array.shape), [0], [array.reshape(-1)])


def _items(fields: Any, num_rows: int) -> Iterable[tuple[str, Any]]:
    tensordict = sys.modules.get("tensordict")
    if tensordict is not None and tensordict.is_tensor_collection(fields):
        if list(fields.batch_size) != [num_rows]:
            raise ProtocolError(f"a TensorDict of a put has batch size [{num_rows}] (one row per key), got {list(fields.batch_size)}; set batch_size=[B]")
        return [(name, _unwrap(tensordict, values, num_rows)) for name, values in fields.items()]
    if not isinstance(fields, Mapping):
        raise ProtocolError(f"fields are a TensorDict or a dict of columns, got {type(fields).__name__}; pass name -> values")
    return [(name, values if tensordict is None else _unwrap(tensordict, values, num_rows)) for name, values in fields.items()]


def _unwrap(tensordict: Any, value: Any, num_rows: int) -> Any:
    if isinstance(value, tensordict.NonTensorStack):
        return value.tolist()
    if isinstance(value, tensordict.NonTensorData):
        return [value.data] * num_rows
    return value


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_nested(value: Any) -> bool:
    return _is_tensor(value) and (jagged.is_jagged(value) or value.is_nested)


def _bytes_of(name: str, value: Any) -> tuple[str, np.ndarray]:
    """(dtype name, contiguous array in its storage dtype) of an array, a tensor or a NumPy scalar."""
    if _is_tensor(value):
        dtype = _dtype_name(value.dtype)
        if value.requires_grad or not value.is_cpu:
            value = value.detach().cpu()
        array = (value.contiguous().view(_torch_dtype(RAW_DTYPES[dtype].name)) if dtype in RAW_DTYPES else value).numpy()
    else:
        array = np.asarray(value)
        dtype = _dtype_name(array.dtype)
    if dtype not in _DTYPES and dtype not in RAW_DTYPES:
        raise DtypeClash(f"columns hold numbers or objects, got dtype {dtype} for {name!r}; pass text and other values as a list")
    if not array.dtype.isnative:
        raise DtypeClash(f"columns are in the machine's byte order, got {array.dtype.str} for {name!r}; convert with astype")
    return dtype, array if array.flags.c_contiguous else np.ascontiguousarray(array)


@functools.lru_cache(maxsize=64)
def _dtype_name(dtype: Any) -> str:
    """Of NumPy or torch."""
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")


def _torch_dtype(name: str) -> Any:
    return getattr(sys.modules["torch"], name)


def _from_batch(name: str, dtype: str, rows: np.ndarray) -> EncodedColumn:
    """(B,) or (B, *inner)."""
    if rows.ndim == 0:
        raise ProtocolError(f"a column has a batch dimension, got a 0-d value for {name!r}; pass shape (B,)")
    declared = TRAJECTORY_FIELDS.get(name)
    if declared is not None and declared.kind == "ragged":
        if rows.ndim < 2:
            raise ProtocolError(f"column {name!r} is ragged, got one number per row; pass shape (B, W) or a list of arrays")
        return _ragged(name, dtype, list(rows), _free_axis(name, rows.ndim - 1))
    kind: Kind = "scalar" if rows.ndim == 1 else "dense"
    spec = _declared(name, ColumnSpec(dtype, kind, None, tuple(rows.shape[1:])))
    return EncodedColumn(name, spec, [0] * len(rows), [rows.reshape(-1)])


def _from_nested(name: str, nested: Any) -> EncodedColumn:
    if not jagged.is_jagged(nested):
        raise ProtocolError(f"nested tensors are jagged, got layout {nested.layout} for {name!r}; build them with nested_tensor_from_jagged")
    packed = jagged.packed(nested)
    if packed is not None:
        dtype, values = _bytes_of(name, packed[0])
        offsets = _bytes_of(name, packed[1])[1]
        spec = _declared(name, ColumnSpec(dtype, "ragged", 0, values.shape[1:]))
        return EncodedColumn(name, spec, np.diff(offsets).tolist(), [values[offsets[0] : offsets[-1]].reshape(-1)])
    pairs = [_bytes_of(name, row) for row in nested.unbind()]
    return _ragged(name, pairs[0][0], [row for _, row in pairs], jagged.ragged_axis(nested))


def _from_list(name: str, values: list) -> EncodedColumn:
    declared = TRAJECTORY_FIELDS.get(name)
    if _are_plain_rows(values):
        dtype, _ = _bytes_of(name, values[0])
        return EncodedColumn(name, _declared(name, ColumnSpec(dtype, "ragged", 0)), [row.size for row in values], values)
    if values and all(_is_tensor(v) or isinstance(v, np.generic) or (isinstance(v, np.ndarray) and v.dtype != object) for v in values):
        pairs = [_bytes_of(name, value) for value in values]
        dtypes = sorted({dtype for dtype, _ in pairs})
        if len(dtypes) > 1:
            raise DtypeClash(f"a column has one dtype, got {dtypes} for {name!r}; convert the rows first")
        ranks = sorted({row.ndim for _, row in pairs})
        if len(ranks) > 1:
            raise ProtocolError(f"rows of a column have one rank, got ranks {ranks} for {name!r}; reshape the rows first")
        rows = [row for _, row in pairs]
        return _from_batch(name, dtypes[0], np.stack(rows)) if ranks == [0] else _ragged(name, dtypes[0], rows, _free_axis(name, ranks[0]))
    if declared is not None and declared.kind == "scalar":
        return _from_batch(name, declared.dtype, _python_numbers(name, declared.dtype, values))
    if declared is not None:
        raise DtypeClash(
            f"column {name!r} is {declared.kind} {declared.dtype}, got {sorted({type(v).__name__ for v in values})}; pass arrays or a nested tensor"
        )
    encoded = [encode_object(value, f"{name}[{place}]") for place, value in enumerate(values)]
    return EncodedColumn(name, OBJECT, [len(data) for data in encoded], [np.frombuffer(data, np.uint8) for data in encoded])


def _are_plain_rows(values: list) -> bool:
    """1-D arrays of one dtype, the common case of a ragged column: written from where they are."""
    first = values[0] if values else None
    if type(first) is not np.ndarray or first.dtype == object:
        return False
    return all(type(row) is np.ndarray and row.ndim == 1 and row.dtype == first.dtype for row in values)


def _python_numbers(name: str, dtype: str, values: list) -> np.ndarray:
    wanted = {"i": int, "u": int, "f": float, "b": bool}[np.dtype(dtype).kind]
    wrong = sorted({type(value).__name__ for value in values if type(value) is not wanted})
    if wrong:
        raise DtypeClash(f"column {name!r} holds {dtype}, got {wrong}; values are never cast")
    return np.asarray(values, dtype)


def _ragged(name: str, dtype: str, rows: list[np.ndarray], axis: int) -> EncodedColumn:
    if not rows:
        raise ProtocolError(f"a put has at least one row, got none for {name!r}; skip empty puts")
    inner = {row.shape[:axis] + row.shape[axis + 1 :] for row in rows}
    if len(inner) > 1:
        raise ProtocolError(f"rows of a ragged column differ in axis {axis} only, got other axes {sorted(inner)} for {name!r}; pad or reshape the rows first")
    spec = _declared(name, ColumnSpec(dtype, "ragged", axis, inner.pop()))
    return EncodedColumn(name, spec, [row.shape[axis] for row in rows], [np.ascontiguousarray(row).reshape(-1) for row in rows])


def _free_axis(name: str, rank: int) -> int:
    """The ragged axis of rows of this rank: the declared one of a known field, else the last."""
    declared = TRAJECTORY_FIELDS.get(name)
    axis = -1 if declared is None or declared.ragged_dim is None else declared.ragged_dim
    return axis % rank


def _declared(name: str, spec: ColumnSpec) -> ColumnSpec:
    """``spec`` itself when it agrees with the schema of known fields (inner axes are free: position ids may be [C, L])."""
    declared = TRAJECTORY_FIELDS.get(name)
    if declared is None:
        return spec
    same_axis = spec.kind != "ragged" or spec.ragged_dim == _free_axis(name, len(spec.inner_shape) + 1)
    if spec.dtype != declared.dtype or spec.kind != declared.kind or not same_axis:
        free = "" if declared.ragged_dim is None else f" with the {'last' if declared.ragged_dim else 'first'} axis free"
        raise DtypeClash(f"column {name!r} is {declared.kind} {declared.dtype}{free}, got {describe_spec(spec)}; values are never cast")
    return spec


def describe_spec(spec: ColumnSpec) -> str:
    """``ragged int64`` or ``dense float32 of (2, 3)``."""
    axis = f" along axis {spec.ragged_dim}" if spec.kind == "ragged" and spec.inner_shape else ""
    return f"{spec.kind} {spec.dtype}{axis}" + (f" of {tuple(spec.inner_shape)}" if spec.inner_shape else "")


# ---- decoding ---------------------------------------------------------------------------------------------------------------------------


def decode_rows(column: LocatedColumn, data: np.ndarray) -> list[Any]:
    """One value per row: arrays (0-d rows as NumPy scalars) or objects. Absent rows are None."""
    if column.spec.kind == "object":
        return _objects(column, data)
    if column.spec.dtype in RAW_DTYPES:
        raise DtypeClash(f"NumPy reads dtypes it has, got {column.spec.dtype} in column {column.name!r}; read it as a tensor with kv_batch_get")
    rows: list[Any]
    if column.spec.kind == "ragged":
        rows = _split(column, data)
    else:
        rows = list(data.view(storage_dtype(column.spec.dtype)).reshape(len(column.lengths), *column.spec.inner_shape))
    return rows if column.present is None else [row if there else None for row, there in zip(rows, column.present, strict=True)]


def decode_tensor(column: LocatedColumn, data: np.ndarray, offsets: dict[tuple[int, ...], Any]) -> Any:
    """The column as it goes into a TensorDict: tensor, jagged nested tensor or NonTensorStack. Columns with rows of the same lengths get the same
    entry of ``offsets``: torch combines nested tensors elementwise only when they share that object."""
    import torch

    spec = column.spec
    if spec.kind == "object":
        from tensordict import NonTensorStack

        return NonTensorStack(*_objects(column, data))
    values = data.view(storage_dtype(spec.dtype))
    if spec.kind != "ragged":
        return _tensor(torch, spec, values.reshape(len(column.lengths), *spec.inner_shape))
    axis = spec.ragged_dim or 0
    if axis == 0:
        values = values.reshape(-1, *spec.inner_shape)
    else:
        values = np.concatenate(_split(column, data), axis=axis)
    lengths = tuple(column.lengths)
    if lengths not in offsets:
        offsets[lengths] = torch.from_numpy(np.cumsum((0, *lengths), dtype=np.int64))
    return jagged.jagged(_tensor(torch, spec, values), offsets[lengths], axis)


def _tensor(torch: Any, spec: ColumnSpec, values: np.ndarray) -> Any:
    tensor = torch.from_numpy(values)
    return tensor.view(getattr(torch, spec.dtype)) if spec.dtype in RAW_DTYPES else tensor


def _split(column: LocatedColumn, data: np.ndarray) -> list[np.ndarray]:
    """Rows of a ragged column as arrays over ``data``."""
    spec, axis = column.spec, column.spec.ragged_dim or 0
    unit, dtype, place, rows = unit_bytes(spec), storage_dtype(spec.dtype), 0, []
    for length in column.lengths:
        shape = (*spec.inner_shape[:axis], length, *spec.inner_shape[axis:])
        rows.append(data[place : place + length * unit].view(dtype).reshape(shape))
        place += length * unit
    return rows


def _objects(column: LocatedColumn, data: np.ndarray) -> list[Any]:
    view, place, values = data.data, 0, []
    for length in column.lengths:
        values.append(decode_object(view[place : place + length]) if length else None)
        place += length
    return values

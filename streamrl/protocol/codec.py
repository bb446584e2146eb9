"""Batches as bytes, without pickle: what is read back can hold data only, never code.

Layout: magic, version and two lengths (header, buffers), the header in msgpack, then the raw buffers. A tensor is (dtype, shape, place of its
bytes), a jagged column (ragged axis, offsets, values); objects are msgpack, with tuples, arrays and tensors inside them kept as such. A view is
written compactly: one row of a large batch costs one row. Tensors come back on the CPU and own their memory.

Refuses with a ProtocolError what it cannot give back equal (other types, integers beyond 64 bits), and input that is damaged or cut off.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor

from streamrl.errors import ProtocolError
from streamrl.protocol.tensors import jagged
from streamrl.protocol.tensors.columns import build, columns_of, is_scalar, is_stack, num_rows, object_array, object_stack

_MAGIC = b"streamrl"
_HEAD = struct.Struct("<8sIQQ")  # magic, version, header bytes, buffer bytes
_VERSION = 1

_TENSOR, _JAGGED, _ARRAY, _OBJECTS, _TUPLE, _NUMPY_SCALAR, _BATCH, _STACK, _SCALAR = range(1, 10)
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
    )
}
_ARRAY_KINDS = frozenset("biufcUSmM")  # numpy kinds that are plain bytes
_DTYPE_NAME = re.compile(r"[<>|=][biufcUSmM][1-9][0-9]{0,8}(\[[0-9]*[A-Za-zμ]+\])?")  # as ``dtype.str`` writes them
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})

_ENCODER = msgspec.msgpack.Encoder()


def encode(value: Any) -> bytes:
    """``value`` (plain data, arrays, tensors, TensorDicts, nested as you like) as bytes."""
    return b"".join(encode_parts(value))


def encode_parts(value: Any) -> Iterator[bytes | memoryview]:
    """The pieces of :func:`encode`, so that a file can be written without a second copy of the buffers."""
    writer = _Writer()
    try:
        header = _ENCODER.encode(writer.pack(value))
    except (OverflowError, UnicodeError, RecursionError, msgspec.MsgspecError) as error:
        raise ProtocolError(f"a batch is written as msgpack and raw buffers, got a value outside of that: {error}; convert the object column") from error
    yield _HEAD.pack(_MAGIC, _VERSION, len(header), writer.size)
    yield header
    yield from writer.buffers


def decode(data: bytes | bytearray | memoryview) -> Any:
    """The value that :func:`encode` was given."""
    view = memoryview(data)
    if len(view) < _HEAD.size:
        raise ProtocolError(f"an encoded batch has a head of {_HEAD.size} bytes, got {len(view)} bytes; the data is cut off")
    magic, version, header_bytes, buffer_bytes = _HEAD.unpack(view[: _HEAD.size])
    if magic != _MAGIC or version != _VERSION:
        raise ProtocolError(f"an encoded batch begins with {_MAGIC!r} version {_VERSION}, got {magic!r} version {version}; it was written by something else")
    if len(view) != _HEAD.size + header_bytes + buffer_bytes:
        raise ProtocolError(f"an encoded batch has {_HEAD.size + header_bytes + buffer_bytes} bytes, got {len(view)}; the data is cut off or has a tail")
    reader = _Reader(view[_HEAD.size + header_bytes :])
    try:
        return reader.decoder.decode(view[_HEAD.size : _HEAD.size + header_bytes])
    except ProtocolError:
        raise
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RuntimeError) as error:
        raise ProtocolError(f"an encoded batch has a valid header, got: {error}; the data is damaged") from error


class _Writer:
    """Turns values into msgpack-able ones and collects the raw buffers."""

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self.size = 0

    def pack(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        if type(value) is list:
            return [self.pack(item) for item in value]
        if isinstance(value, dict):
            return {self._key(key): self.pack(item) for key, item in value.items()}
        if type(value) is tuple:
            return self._ext(_TUPLE, [self.pack(item) for item in value])
        if isinstance(value, np.generic):
            return self._ext(_NUMPY_SCALAR, self._array(np.asarray(value)))
        if isinstance(value, np.ndarray):
            return self._objects(value) if value.dtype == object else self._ext(_ARRAY, self._array(value))
        if isinstance(value, Tensor):
            return self._jagged(value) if value.is_nested else self._ext(_TENSOR, self._tensor(value))
        if is_stack(value):
            return self._ext(_STACK, self.pack(value.tolist()))
        if is_scalar(value):
            return self._ext(_SCALAR, self.pack(value.data))
        if isinstance(value, TensorDict):
            return self._ext(_BATCH, [num_rows(value), {name: self.pack(column) for name, column in columns_of(value).items()}])
        raise ProtocolError(f"objects of a batch are plain data, arrays or tensors, got {type(value).__name__}; convert it to lists and dicts")

    def _key(self, key: Any) -> Any:
        if type(key) not in _PLAIN:
            raise ProtocolError(f"keys of a dict are plain values, got {type(key).__name__}; convert it to a string")
        return key

    def _ext(self, code: int, body: Any) -> msgspec.msgpack.Ext:
        return msgspec.msgpack.Ext(code, _ENCODER.encode(body))

    def _objects(self, array: np.ndarray) -> msgspec.msgpack.Ext:
        return self._ext(_OBJECTS, [list(array.shape), [self.pack(item) for item in array.ravel()]])

    def _array(self, array: np.ndarray) -> list[Any]:
        if array.dtype.kind not in _ARRAY_KINDS or not array.dtype.itemsize:
            raise ProtocolError(f"arrays hold numbers, strings or objects, got dtype {array.dtype}; split the fields into columns")
        flat = np.ascontiguousarray(array).reshape(-1)
        return [array.dtype.str, list(array.shape), *self._buffer(flat.view(np.uint8) if flat.size else np.empty(0, np.uint8))]

    def _tensor(self, tensor: Tensor) -> list[Any]:
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in _DTYPES or tensor.layout != torch.strided:
            raise ProtocolError(f"tensors are dense with one of the dtypes {sorted(_DTYPES)}, got {name} of layout {tensor.layout}; convert it")
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
        return [name, list(tensor.shape), *self._buffer(raw)]

    def _jagged(self, tensor: Tensor) -> msgspec.msgpack.Ext:
        values, offsets, axis = jagged.parts(tensor, "a column")
        return self._ext(_JAGGED, [axis, self._tensor(offsets), self._tensor(values)])

    def _buffer(self, raw: np.ndarray) -> tuple[int, int]:
        """(place, bytes) of a buffer."""
        place = self.size
        self.buffers.append(raw.data)
        self.size += raw.nbytes
        return place, raw.nbytes


class _Reader:
    """Gives the values back; every size is checked against the bytes that are there."""

    def __init__(self, buffers: memoryview) -> None:
        self.buffers = buffers
        self.decoder = msgspec.msgpack.Decoder(ext_hook=self._unpack)

    def _unpack(self, code: int, body: memoryview) -> Any:
        value = self.decoder.decode(body)
        if code == _TENSOR:
            return self._tensor(*value)
        if code == _JAGGED:
            return self._jagged(*value)
        if code == _ARRAY:
            return self._array(*value)
        if code == _NUMPY_SCALAR:
            return self._array(*value)[()]
        if code == _OBJECTS:
            shape, items = value
            return object_array(items).reshape(shape)
        if code == _TUPLE:
            return tuple(value)
        if code == _STACK:
            return object_stack(value)
        if code == _SCALAR:
            return NonTensorData(value)
        if code == _BATCH:
            rows, columns = value
            return build(columns, rows)
        raise ProtocolError(f"an encoded batch has the kinds 1..{_SCALAR}, got {code}; it was written by a newer version")

    def _bytes(self, count: int, itemsize: int, place: int, nbytes: int) -> np.ndarray:
        if count * itemsize != nbytes or place < 0 or place + nbytes > len(self.buffers):
            raise ProtocolError(
                f"a buffer lies inside the data, got {nbytes} bytes at {place} of {len(self.buffers)} for {count} items of {itemsize}; the data is damaged"
            )
        return np.frombuffer(self.buffers, np.uint8, nbytes, place).copy() if nbytes else np.empty(0, np.uint8)

    def _tensor(self, dtype_name: str, shape: list[int], place: int, nbytes: int) -> Tensor:
        dtype = _DTYPES[dtype_name]
        raw = self._bytes(_count(shape), dtype.itemsize, place, nbytes)
        return torch.from_numpy(raw).view(dtype).reshape(shape) if nbytes else torch.empty(shape, dtype=dtype)

    def _array(self, dtype_name: str, shape: list[int], place: int, nbytes: int) -> np.ndarray:
        if not _DTYPE_NAME.fullmatch(dtype_name):  # NumPy's own parser takes far more; without a size, any number of items would need no bytes
            raise ProtocolError(f"arrays hold numbers or strings, got dtype {dtype_name!r}; the data is damaged")
        dtype = np.dtype(dtype_name)
        raw = self._bytes(_count(shape), dtype.itemsize, place, nbytes)
        return raw.view(dtype).reshape(shape) if nbytes else np.zeros(shape, dtype)

    def _jagged(self, axis: int, offsets: list[Any], values: list[Any]) -> Tensor:
        ends, buffer = self._tensor(*offsets), self._tensor(*values)
        sound = 1 <= axis <= buffer.dim() and ends.dim() == 1 and len(ends) > 0 and not ends.is_floating_point()
        if not sound or ends[0] != 0 or ends[-1] != buffer.shape[axis - 1] or bool((ends.diff() < 0).any()):
            raise ProtocolError("offsets of a jagged column grow from 0 to the number of its values, got others; the data is damaged")
        return jagged.from_parts(buffer, ends, axis)


def _count(shape: list[int]) -> int:
    if any(type(n) is not int or n < 0 for n in shape):
        raise ProtocolError(f"a shape has non-negative sizes, got {shape}; the data is damaged")
    return math.prod(shape)

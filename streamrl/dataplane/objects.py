"""Object columns: msgpack values only, so that no reader ever runs code. NumPy arrays inside them travel as (dtype, shape, bytes)."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from streamrl.errors import DtypeClash, ProtocolError

_ARRAY = 1  # msgpack extension code of a NumPy array
_PLAIN = frozenset({type(None), bool, float, str, bytes})
_MAX_DEPTH = 64
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1


def _encode_array(value: Any) -> msgspec.msgpack.Ext:
    header = [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
    return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(header))


def _decode_array(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise ProtocolError(f"object columns hold arrays as extension {_ARRAY}, got extension {code}; the row is damaged")
    dtype, shape, raw = msgspec.msgpack.decode(data)
    return np.frombuffer(raw, np.dtype(dtype)).reshape(shape).copy()


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_DECODER = msgspec.msgpack.Decoder(ext_hook=_decode_array)


def encode_object(value: Any, path: str) -> bytes:
    """Bytes of ``value``. DtypeClash (a TypeError) names the path of what can't be stored: ``reward_model[0].scorer``."""
    check_object(value, path)
    return _ENCODER.encode(value)


def decode_object(data: bytes | memoryview) -> Any:
    return _DECODER.decode(data)


def check_object(value: Any, path: str, depth: int = 0) -> None:
    """Only None, bool, int, float, str, bytes, list, dict and NumPy arrays; subclasses would come back as something else."""
    kind = type(value)
    if kind in _PLAIN:
        return
    if depth > _MAX_DEPTH:
        raise ProtocolError(f"objects nest at most {_MAX_DEPTH} deep, got more at {path}; flatten the value")
    if kind is int and _INT_MIN <= value <= _INT_MAX:
        return
    if kind is list:
        for place, item in enumerate(value):
            check_object(item, f"{path}[{place}]", depth + 1)
    elif kind is dict:
        for key, item in value.items():
            if type(key) is not str and type(key) is not int:
                raise DtypeClash(f"keys of an object are str or int, got {type(key).__name__} at {path}; convert it first")
            check_object(item, f"{path}.{key}", depth + 1)
    elif kind is not np.ndarray or value.dtype.kind not in "biufcSU":
        shown = f"{value.dtype} array" if kind is np.ndarray else f"{kind.__module__}.{kind.__qualname__}"
        raise DtypeClash(f"objects are None, bool, 64-bit int, float, str, bytes, list, dict or NumPy arrays, got {shown} at {path}; convert it first")

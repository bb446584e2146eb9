"""Equality of columns and one-line descriptions of them.

Tensors: NaN differs from NaN, since two computed columns with NaN are not known to agree. Objects: NaN equals NaN. Jagged columns are
compared by offsets first, then by values. A description never moves more than the offsets to the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from streamrl.errors import ProtocolError
from streamrl.protocol.equality import deep_equal
from streamrl.protocol.tensors import jagged
from streamrl.protocol.tensors.columns import columns_of, is_scalar, is_stack, unwrap

_SHOWN_LENGTHS = 16  # more would make the line unreadable


def difference(a: Any, b: Any) -> str | None:
    """In which respect two columns differ; None when they are equal."""
    if isinstance(a, Tensor) != isinstance(b, Tensor) or is_stack(a) != is_stack(b) or is_scalar(a) != is_scalar(b):
        return f"kinds {type(a).__name__} and {type(b).__name__}"
    if not isinstance(a, Tensor):
        return None if deep_equal(unwrap(a), unwrap(b)) else "different objects"
    if a.dtype != b.dtype:
        return f"dtypes {a.dtype} and {b.dtype}"
    if a.is_nested != b.is_nested:
        return "a jagged and a dense tensor"
    return _nested_difference(a, b) if a.is_nested else _dense_difference(a, b)


def _nested_difference(a: Tensor, b: Tensor) -> str | None:
    (values_a, offsets_a, axis_a), (values_b, offsets_b, axis_b) = jagged.parts(a), jagged.parts(b)
    if axis_a != axis_b:
        return f"ragged axes {axis_a} and {axis_b}"
    if _dense_difference(offsets_a, offsets_b):
        return "different row lengths"
    return _dense_difference(values_a, values_b)


def _dense_difference(a: Tensor, b: Tensor) -> str | None:
    if a.shape != b.shape:
        return f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
    return None if torch.equal(a, b.to(a.device)) else "different values"


def assert_equal(a: TensorDict, b: TensorDict) -> None:
    """ProtocolError that names the first column in which two batches differ."""
    left, right = columns_of(a), columns_of(b)
    if left.keys() != right.keys():
        raise ProtocolError(f"batches have the same columns, got {sorted(left.keys() ^ right.keys())} in only one of them; select first")
    if a.batch_size != b.batch_size:
        raise ProtocolError(f"batches have the same rows, got batch sizes {tuple(a.batch_size)} and {tuple(b.batch_size)}; select the same rows")
    for name in left:
        reason = difference(left[name], right[name])
        if reason:
            raise ProtocolError(f"batches have equal columns, got {reason} for {name!r}; compare the rows of that column")


def describe(name: str, tensor: Any) -> str:
    """One line about a column.

    >>> describe("responses", jagged.nested_from_list([torch.arange(3), torch.arange(5)]))
    'responses: jagged rows=2 lengths=[3, 5] torch.int64 cpu'
    """
    if isinstance(tensor, Tensor) and tensor.is_nested:
        lengths = jagged.lengths_of(tensor).tolist()
        return f"{name}: jagged rows={len(lengths)} lengths={_shortened(lengths)} {tensor.dtype} {tensor.device}"
    if isinstance(tensor, Tensor):
        return f"{name}: dense shape={tuple(tensor.shape)} {tensor.dtype} {tensor.device}"
    if is_scalar(tensor):
        return f"{name}: batch-less {type(tensor.data).__name__}"
    if is_stack(tensor):
        tensor = tensor.tolist()
    if isinstance(tensor, np.ndarray) and tensor.dtype != object:
        return f"{name}: array shape={tensor.shape} {tensor.dtype}"
    if isinstance(tensor, list | np.ndarray):
        types = sorted({type(item).__name__ for item in tensor})
        return f"{name}: object rows={len(tensor)} of {' or '.join(types) or 'nothing'}"
    return f"{name}: batch-less {type(tensor).__name__}"


def _shortened(lengths: list[int]) -> str:
    if len(lengths) <= _SHOWN_LENGTHS:
        return str(lengths)
    head = ", ".join(str(n) for n in lengths[:_SHOWN_LENGTHS])
    return f"[{head}, ...] min={min(lengths)} max={max(lengths)} sum={sum(lengths)}"

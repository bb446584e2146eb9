"""Deep equality of object columns and metadata: the one meaning of "equal" when two batches are joined.

Types must match (1 is not 1.0), NaN equals NaN, arrays are compared by dtype, shape and value, and structures that contain
themselves end. Knows tensors only when torch is already loaded; a process that moves metadata never loads it through here.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def deep_equal(left: Any, right: Any) -> bool:
    """True when both are the same value.

    >>> deep_equal({"a": [float("nan")]}, {"a": [float("nan")]}), deep_equal([1], [1.0])
    (True, False)
    """
    todo: list[tuple[Any, Any]] = [(left, right)]
    seen: set[tuple[int, int]] = set()
    while todo:
        a, b = todo.pop()
        if a is b or (id(a), id(b)) in seen:
            continue
        if type(a) is not type(b):
            return False
        seen.add((id(a), id(b)))
        parts = _parts(a, b)
        if parts is None:
            return False
        todo.extend(parts)
    return True


def _parts(a: Any, b: Any) -> list[tuple[Any, Any]] | None:
    """What is left to compare of two values of one type; None when they differ already."""
    if isinstance(a, dict):
        return [(a[key], b[key]) for key in a] if a.keys() == b.keys() else None
    if isinstance(a, list | tuple):
        return list(zip(a, b, strict=True)) if len(a) == len(b) else None
    if isinstance(a, np.ndarray):
        return _array_parts(a, b)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(a, torch.Tensor):
        return [] if _same_tensor(a, b) else None
    return [] if bool(a == b) or (a != a and b != b) else None


def _array_parts(a: np.ndarray, b: np.ndarray) -> list[tuple[Any, Any]] | None:
    if a.dtype != b.dtype or a.shape != b.shape:
        return None
    if a.dtype == object:
        return list(zip(a.ravel().tolist(), b.ravel().tolist(), strict=True))
    same = np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    return [] if same else None


def _same_tensor(a: Any, b: Any) -> bool:
    if a.dtype != b.dtype or a.is_nested != b.is_nested:
        return False
    if a.is_nested:
        return a.size(0) == b.size(0) and all(_same_tensor(x, y) for x, y in zip(a.unbind(), b.unbind(), strict=True))
    other = b.to(a.device)
    return a.shape == b.shape and bool(((a == other) | ((a != a) & (other != other))).all())

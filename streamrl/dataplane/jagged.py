"""Jagged nested tensors from within: every question that such a tensor is asked through its public face costs 5 to 20 us, and building one 40.

The one file that knows torch's own class. What :func:`jagged` makes is what ``torch.nested.nested_tensor_from_jagged`` makes of values that nobody
differentiates: it only isn't noted as a view of them. Importing this needs no torch.
"""

from __future__ import annotations

import sys
from typing import Any

_MODULE = "torch.nested._internal.nested_tensor"


def is_jagged(value: Any) -> bool:
    """Whether ``value`` is a jagged nested tensor."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(value, module.NestedTensor)


def packed(nested: Any) -> tuple[Any, Any] | None:
    """(values, offsets) when the rows lie back to back along their first axis, else None."""
    if nested._ragged_idx != 1 or nested._lengths is not None or not nested._values.is_contiguous():
        return None
    return nested._values, nested._offsets


def ragged_axis(nested: Any) -> int:
    """The axis of free length of a row."""
    return nested._ragged_idx - 1


def jagged(values: Any, offsets: Any, axis: int) -> Any:
    """Rows of free length along ``axis``, whose ends are ``offsets``."""
    from torch.nested._internal.nested_tensor import NestedTensor

    return NestedTensor(values, offsets, _ragged_idx=axis + 1)

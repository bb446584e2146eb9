"""Jagged columns: rows of one free length each, stored as one buffer of values and the offsets where rows begin and end.

The ragged axis is always explicit. Two rows of shape (4, 5) declared ragged in their last axis are a column of shape (2, 4, j), never
(2, j, 5) and never a dense (2, 4, 5). Gradients flow through every function here.

Shapes: B rows, T values along the ragged axis over all rows, R values of the result. ``axis`` counts in the column, so 1 is the first
axis of a row. Does not pad; that is ``padding.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from streamrl.errors import DtypeClash, ProtocolError, WrongType


def check_jagged(x: Tensor, name: str) -> Tensor:
    """The values of ``x``; ProtocolError unless it is a contiguous nested tensor of the jagged layout."""
    if not isinstance(x, Tensor) or not x.is_nested:
        raise ProtocolError(f"{name} is a nested tensor, got {_kind(x)}; build it with nested_from_list")
    if x.layout != torch.jagged:
        raise ProtocolError(f"a nested tensor has the jagged layout, got {x.layout} for {name}; build it with nested_from_list")
    nested: Any = x
    values: Tensor = nested.values()
    if nested.lengths() is not None or not values.is_contiguous():  # what x.is_contiguous() means, at half its price
        raise ProtocolError(f"a nested tensor is contiguous, got one with gaps between rows for {name}; call .contiguous() first")
    return values


def ragged_axis(x: Tensor) -> int:
    """The axis of the column (1 or more) along which its rows differ in length."""
    nested: Any = x
    return int(nested._ragged_idx)  # torch offers no public name for it


def parts(x: Tensor, name: str = "x") -> tuple[Tensor, Tensor, int]:
    """(values, offsets, axis) of a jagged column; values hold exactly the column's rows and run along their axis ``axis - 1``."""
    nested: Any = x
    values = check_jagged(x, name)
    offsets, axis = nested.offsets(), ragged_axis(x)
    first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    if first != 0 or last != values.shape[axis - 1]:
        values, offsets = values.narrow(axis - 1, first, last - first), offsets - first
    return values, offsets, axis


def from_parts(values: Tensor, offsets: Tensor, axis: int = 1) -> Tensor:
    """The jagged column of ``values`` cut at ``offsets``. Columns built on one ``offsets`` object can be combined elementwise."""
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets, jagged_dim=axis)


def lengths_of(x: Tensor) -> Tensor:
    """int64 [B], the length of each row along the ragged axis."""
    return parts(x)[1].diff()


def offsets_of(lengths_B: Tensor) -> Tensor:
    """int64 [B + 1]: row i is the range offsets[i] .. offsets[i + 1]."""
    return torch.nn.functional.pad(lengths_B.to(torch.int64).cumsum(0), (1, 0))


def ranges(starts_B: Tensor, lengths_B: Tensor) -> Tensor:
    """int64 [R], the numbers starts[i] .. starts[i] + lengths[i] - 1 of every row, one row after the other.

    >>> ranges(torch.tensor([3, 10]), torch.tensor([3, 2])).tolist()
    [3, 4, 5, 10, 11]
    """
    offsets = offsets_of(lengths_B)
    shift_B = starts_B - offsets[:-1]
    total = int(offsets[-1])
    return torch.arange(total, device=starts_B.device) + torch.repeat_interleave(shift_B, lengths_B, output_size=total)


def select_rows(x: Tensor, indices: Tensor) -> Tensor:
    """The rows ``indices`` of a jagged column, in that order; a row may be taken more than once."""
    values, offsets, axis = parts(x)
    rows = values.unsafe_split_with_sizes(offsets.diff().tolist(), dim=axis - 1)  # nobody writes to these views
    picked = [rows[i] for i in indices.tolist()]
    joined = torch.cat(picked, dim=axis - 1) if picked else values.narrow(axis - 1, 0, 0).contiguous()  # whole rows copy faster than an index per value
    return from_parts(joined, offsets_of(offsets.diff()[indices.to(offsets.device)]), axis)


def slice_rows(x: Tensor, start: int, stop: int) -> Tensor:
    """Rows start .. stop - 1; on the same memory when the ragged axis is the first of a row, else copied to stay contiguous."""
    values, offsets, axis = parts(x)
    first = int(offsets[start])
    return from_parts(values.narrow(axis - 1, first, int(offsets[stop]) - first).contiguous(), offsets[start : stop + 1] - first, axis)


def chunk_rows(x: Tensor, size: int) -> list[Tensor]:
    """Columns of ``size`` rows each, on memory of their own."""
    values, offsets, axis = parts(x)
    ends = offsets[::size].tolist()
    chunks = []
    for i, (first, last) in enumerate(itertools.pairwise(ends)):
        part = values.narrow(axis - 1, first, last - first).clone(memory_format=torch.contiguous_format)
        chunks.append(from_parts(part, offsets[i * size : (i + 1) * size + 1] - first, axis))
    return chunks


def rows_of(x: Tensor) -> list[Tensor]:
    """The rows as plain tensors on the same memory."""
    values, offsets, axis = parts(x)
    return list(values.split(offsets.diff().tolist(), dim=axis - 1))


def nested_from_list(tensors: Sequence[Tensor], ragged_dim: int = -1) -> Tensor:
    """One jagged column of rows whose axis ``ragged_dim`` is free, also when all lengths happen to be equal.

    >>> nested_from_list([torch.ones(4, 5), torch.ones(4, 5)]).shape[:2]
    torch.Size([2, 4])
    """
    return join_rows("a column", tensors, ragged_dim)


def join_rows(name: str, tensors: Sequence[Tensor], ragged_dim: int) -> Tensor:
    """:func:`nested_from_list` for a column whose name goes into the errors."""
    if not tensors:
        raise ProtocolError(f"{name} is built from at least one row, got none; skip the column when the batch is empty")
    strange = [type(row).__name__ for row in tensors if not isinstance(row, Tensor)]
    if strange:
        raise WrongType(f"rows of {name} are tensors, got {strange[0]}; convert them with torch.tensor")
    first = tensors[0]
    if first.dim() == 0 or not -first.dim() <= ragged_dim < first.dim():
        raise ProtocolError(
            f"the ragged axis of {name} lies inside a row, got ragged_dim={ragged_dim} for rows of shape {tuple(first.shape)}; scalars are a dense column"
        )
    axis = ragged_dim % first.dim()
    lengths = torch.tensor(_checked_lengths(name, tensors, axis), device=first.device)
    return from_parts(torch.cat(list(tensors), dim=axis), offsets_of(lengths), axis + 1)


def concat_nested(tensors: Sequence[Tensor]) -> Tensor:
    """The rows of all columns, in order; the ragged axis is that of the inputs."""
    if not tensors:
        raise ProtocolError("concat_nested takes at least one column, got none; check the list of parts")
    split = [parts(x, f"part {i}") for i, x in enumerate(tensors)]
    values_0, _, axis = split[0]
    for i, (values, _, other) in enumerate(split):
        if other != axis or values.dim() != values_0.dim():
            raise ProtocolError(
                f"parts share one ragged axis and rank, got axis {other} of {values.dim() + 1} in part {i} and {axis} of {values_0.dim() + 1} in part 0;"
                " build both with one ragged_dim"
            )
        _check_row("a column", i, values, values_0, axis - 1)
    lengths = torch.cat([offsets.diff() for _, offsets, _ in split])
    return from_parts(torch.cat([values for values, _, _ in split], dim=axis - 1), offsets_of(lengths), axis)


def _checked_lengths(name: str, rows: Sequence[Tensor], axis: int) -> list[int]:
    if {(row.dtype, row.dim()) for row in rows} == {(rows[0].dtype, 1)}:
        return [row.numel() for row in rows]  # vectors of one dtype fit each other
    for i, row in enumerate(rows):
        _check_row(name, i, row, rows[0], axis)
    return [row.shape[axis] for row in rows]


def _check_row(name: str, i: int, row: Tensor, first: Tensor, axis: int) -> None:
    if row.is_nested:
        raise ProtocolError(f"a row of {name} is a plain tensor, got a nested tensor at {i}; use concat_nested to join columns")
    if row.dtype != first.dtype:
        raise DtypeClash(f"rows of {name} have one dtype, got {first.dtype} at 0 and {row.dtype} at {i}; convert them first")
    fixed, expected = list(row.shape), list(first.shape)
    if len(fixed) != len(expected) or fixed[:axis] + fixed[axis + 1 :] != expected[:axis] + expected[axis + 1 :]:
        raise ProtocolError(
            f"rows of {name} differ along the ragged axis {axis} only, got shapes {tuple(expected)} at 0 and {tuple(fixed)} at {i}; pad or drop the other axes"
        )


def _kind(x: object) -> str:
    return f"a dense tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__

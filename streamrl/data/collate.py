"""Rows -> columns, for the DataLoader. (Lists of DataProto items are collated by the protocol package, under another name.)"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from streamrl.errors import ProtocolError


def collate_fn(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Tensors are stacked on dim 0; every other column becomes an object array with exactly one element per row.

    Two rows give ``dummy_tensor`` uint8 [2, 1] and ``raw_prompt`` object [2]; lists of equal length never collapse into a second axis.
    """
    if not rows:
        raise ProtocolError("a batch has at least one row, got none; skip empty batches")
    names = set(rows[0])
    for place, row in enumerate(rows):
        if set(row) != names:
            raise ProtocolError(f"rows of a batch have the same keys, got {sorted(names ^ set(row))} in row 0 or row {place} only; add the missing columns")
    return {name: _column(name, [row[name] for row in rows]) for name in rows[0]}


def _column(name: str, values: list[Any]) -> torch.Tensor | np.ndarray:
    tensors = sum(isinstance(value, torch.Tensor) for value in values)
    if tensors == len(values):
        kinds = sorted({f"{tuple(value.shape)} {value.dtype}" for value in values})
        if len(kinds) > 1:
            raise ProtocolError(f"tensors of a column have one shape and dtype, got {', '.join(kinds)} in {name!r}; pad them or return lists")
        return torch.stack(values)
    if tensors:
        raise ProtocolError(f"a column holds tensors in all rows or in none, got {tensors} of {len(values)} in {name!r}; convert the others")
    column = np.empty(len(values), dtype=object)
    column[:] = [None] * len(values)
    for place, value in enumerate(values):
        column[place] = value
    return column

"""Columns of a rank's rows on the CPU, and micro-batches cut from them.

A column is flat values plus offsets, as the store's jagged tensors are; a micro-batch is right-padded to its longest row. Padding rows
and padding positions live only here: nothing of them reaches a store, a statistic or a metric.

Shapes: B rows of a micro-batch, L tokens of its longest row, R response tokens of its longest response, N selected tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from tensordict import TensorDict
from torch import Tensor

from streamrl.errors import ProtocolError


@dataclass(frozen=True)
class Column:
    """A ragged column: row i is ``values[offsets[i] : offsets[i + 1]]``."""

    values: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, nested: Tensor) -> Column:
        """From a jagged tensor [B, j] (or a dense one, whose rows have one length)."""
        if nested.is_nested:
            return cls(nested.values(), nested.offsets().long())
        return cls(nested.reshape(-1), torch.arange(nested.shape[0] + 1) * nested.shape[1])

    @classmethod
    def empty(cls, dtype: torch.dtype) -> Column:
        return cls(torch.zeros(0, dtype=dtype), torch.zeros(1, dtype=torch.long))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self) -> Tensor:
        return self.offsets.diff()

    def positive(self) -> Tensor:
        """How many values of each row are above 0."""
        before = torch.zeros(len(self.values) + 1, dtype=torch.long)
        torch.cumsum(self.values > 0, 0, out=before[1:])
        return before[self.offsets].diff()

    def padded(self, rows: Tensor | None = None) -> Tensor:
        """Right-padded with 0 to the longest of ``rows`` (None: all)."""
        starts, lengths = (self.offsets[:-1], self.lengths()) if rows is None else (self.offsets[rows], self.lengths()[rows])
        places = torch.arange(int(lengths.max()))
        inside = places < lengths[:, None]
        out = torch.zeros(inside.shape, dtype=self.values.dtype)
        out[inside] = self.values[(starts[:, None] + places)[inside]]
        return out


@dataclass(frozen=True)
class Rows:
    """Some rows of the batch: their keys and the columns that were asked for; token columns are aligned with the response."""

    keys: list[str]
    ids: Column  # prompt and response
    columns: dict[str, Column]  # per response token
    weights: Tensor  # [rows] float64: 1, or less for an output of a session that has several

    @classmethod
    def of(cls, keys: list[str], columns: TensorDict, response_fields: Sequence[str]) -> Rows:
        weights = columns["session_weight"].double() if "session_weight" in columns else torch.ones(len(keys), dtype=torch.float64)
        rows = cls(list(keys), Column.of(columns["input_ids"]), {name: Column.of(columns[name]) for name in response_fields}, weights.reshape(-1))
        for name, column in rows.columns.items():
            sizes = column.lengths()
            wrong = [keys[i] for i in torch.nonzero((sizes < 1) | (sizes >= rows.ids.lengths())).flatten().tolist()]
            if wrong:
                raise ProtocolError(f"a row has a prompt and a response, got {name} as long as input_ids or empty in {wrong[:3]}; write whole rows")
        return rows

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def none(cls, response_fields: Sequence[str]) -> Rows:
        """The share of a rank when there are fewer rows than ranks; it runs on padding rows."""
        return cls([], Column.empty(torch.long), {name: Column.empty(torch.float32) for name in response_fields}, torch.ones(0, dtype=torch.float64))

    def with_column(self, name: str, column: Column) -> Rows:
        """The same rows and one more column."""
        return replace(self, columns=self.columns | {name: column})

    def micro_batch(self, rows: Sequence[int], mask_field: str) -> MicroBatch:
        """The padded micro-batch of these rows whose selected tokens are those with ``mask_field`` on; no rows: one padding row."""
        if not rows:
            return padding_micro_batch(list(self.columns))
        index = torch.tensor(rows)
        prompt_lengths_B = (self.ids.lengths() - self.columns[mask_field].lengths())[index]
        padded = {name: column.padded(index) for name, column in self.columns.items()}
        weights_B = self.weights[index]
        unlike = weights_B if (weights_B != 1).any() else None
        return MicroBatch(self.ids.padded(index), prompt_lengths_B, padded, _selection(padded[mask_field]), unlike)


@dataclass(frozen=True)
class MicroBatch:
    """Right-padded rows. ``rows_N``, ``tokens_N``: which response token (row, place in the response) each computed log-prob scores."""

    ids_BL: Tensor
    prompt_lengths_B: Tensor
    columns: dict[str, Tensor]  # each [B, R]
    selection: tuple[Tensor, Tensor]
    weights_B: Tensor | None = None  # of the rows; None: 1 each

    @property
    def computed_tokens(self) -> int:
        return self.ids_BL.numel()

    def positions_N(self) -> tuple[Tensor, Tensor]:
        """(row, column) in ``ids_BL`` whose model output scores the selected token: the one before it."""
        rows_N, tokens_N = self.selection
        return rows_N, self.prompt_lengths_B[rows_N] + tokens_N - 1

    def spread(self, values_N: Tensor) -> Tensor:
        """Values of the selected tokens as [B, R]; 0 elsewhere. Keeps gradients."""
        like = next(iter(self.columns.values()))
        return torch.zeros(like.shape, dtype=values_N.dtype, device=values_N.device).index_put(self.selection, values_N)

    def to(self, device: torch.device) -> MicroBatch:
        if device.type == "cpu":
            return self
        columns = {name: value.to(device, non_blocking=True) for name, value in self.columns.items()}
        rows_N, tokens_N = self.selection
        weights_B = None if self.weights_B is None else self.weights_B.to(device)
        return MicroBatch(self.ids_BL.to(device), self.prompt_lengths_B.to(device), columns, (rows_N.to(device), tokens_N.to(device)), weights_B)


def _selection(mask_BR: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and places of the tokens to score; one token when there are none, since every rank takes part in every backward pass."""
    rows_N, tokens_N = torch.nonzero(mask_BR, as_tuple=True)
    return (rows_N, tokens_N) if len(rows_N) else (torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long))


def padding_micro_batch(fields: Sequence[str]) -> MicroBatch:
    """One padding row (a prompt and a response token, all masks 0) for a rank that has fewer rows than the others."""
    columns = {name: torch.zeros(1, 1) for name in fields}
    return MicroBatch(torch.zeros(1, 2, dtype=torch.long), torch.ones(1, dtype=torch.long), columns, _selection(torch.zeros(1, 1)))

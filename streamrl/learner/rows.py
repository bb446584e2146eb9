"""Columns of a rank's rows on the CPU, and micro-batches cut from them.

A column is flat values plus offsets, as the store's jagged tensors are. A micro-batch has its columns right-padded to its longest response, and its tokens
as the model takes them (``packing.py``). Padding rows and padding positions live only here: nothing of them reaches a store, a statistic or a metric.

Shapes: B rows of a micro-batch, R response tokens of its longest response, N selected tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from tensordict import TensorDict
from torch import Tensor

from streamrl.errors import ProtocolError
from streamrl.learner.packing import Inputs, Layout, pack_rows, pad_rows


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

    def row(self, i: int) -> Tensor:
        return self.values[self.offsets[i] : self.offsets[i + 1]]

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

    @cached_property
    def lengths(self) -> list[int]:
        return self.ids.lengths().tolist()

    @cached_property
    def prompt_lengths(self) -> list[int]:
        return (self.ids.lengths() - next(iter(self.columns.values())).lengths()).tolist()

    @cached_property
    def prompts(self) -> list[int]:
        """A number for the prompt of each row; equal prompts, of whatever group, have equal ones."""
        known: dict[bytes, int] = {}
        sized = enumerate(self.prompt_lengths)
        return [known.setdefault(self.ids.row(i)[:size].numpy().tobytes(), len(known)) for i, size in sized]

    def micro_batch(self, rows: Sequence[int], mask_field: str, layout: Layout) -> MicroBatch:
        """Of these rows, for the tokens with ``mask_field`` on; no rows: one padding row, so that a rank takes part in every pass."""
        if not rows:
            return one_row([0, 0], torch.zeros(1), list(self.columns), layout)
        index = torch.tensor(rows)
        padded = {name: column.padded(index) for name, column in self.columns.items()}
        selection = _selection(padded[mask_field])
        ids, prompt_lengths = [self.ids.row(i) for i in rows], [self.prompt_lengths[i] for i in rows]
        prompts = [self.prompts[i] for i in rows] if layout.shared_prompts else None
        inputs = pack_rows(ids, prompt_lengths, selection, prompts) if layout.packed else pad_rows(ids, prompt_lengths, selection)
        weights_B = self.weights[index]
        keys = tuple(self.keys[i] for i in rows)
        return MicroBatch(inputs, padded, selection, weights_B if (weights_B != 1).any() else None, keys)


@dataclass(frozen=True)
class MicroBatch:
    """``selection``: which response token (row, place in the response) each computed log-prob or value is of."""

    inputs: Inputs
    columns: dict[str, Tensor]  # each [B, R]
    selection: tuple[Tensor, Tensor]
    weights_B: Tensor | None = None  # of the rows; None: 1 each
    keys: tuple[str, ...] = ()  # of the rows; a padding row has none

    @property
    def computed_tokens(self) -> int:
        return self.inputs.ids.numel()

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
        return MicroBatch(self.inputs.to(device), columns, (rows_N.to(device), tokens_N.to(device)), weights_B, self.keys)


def one_row(ids: Sequence[int], mask: Tensor, fields: Sequence[str], layout: Layout) -> MicroBatch:
    """A row that is in no batch: ``len(mask)`` tokens are its response, those with the mask on are selected; its columns are 0."""
    selection, lay = _selection(mask[None]), pack_rows if layout.packed else pad_rows
    columns = {name: torch.zeros(1, len(mask)) for name in fields}
    return MicroBatch(lay([torch.tensor(ids)], [len(ids) - len(mask)], selection), columns, selection)


def _selection(mask_BR: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and places of the tokens to score; one token when there are none, since every rank takes part in every backward pass."""
    rows_N, tokens_N = torch.nonzero(mask_BR, as_tuple=True)
    return (rows_N, tokens_N) if len(rows_N) else (torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long))

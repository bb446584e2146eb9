"""How the rows of a micro-batch lie in a pass of the model, and where in its output a response token is scored.

Packed: one sequence without padding, positions counted anew for every row, attention by ``attention.py``; rows with equal prompts may share them, so
that a prompt is computed once, forward and backward. Right-padded: for models that cannot be packed; attention is causal, so no real token can see
padding and no mask is needed. Either way a token's scores are those of its row alone. Knows nothing of columns, losses or heads.

Shapes: B rows, L tokens of the longest, T tokens of a packed pass, N selected response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from streamrl.config.training import LearnerConfig
from streamrl.learner.attention import AttentionPlan, Run, is_packed
from streamrl.learner.balance import LINEAR


class Layout(NamedTuple):
    """How a model takes rows, and what they cost it."""

    packed: bool = False
    shared_prompts: bool = False
    workload_linear: int = LINEAR


def layout_of(model: nn.Module, learner: LearnerConfig) -> Layout:
    packed = is_packed(model)
    return Layout(packed, packed and learner.shared_prompts, learner.workload_linear)


@dataclass(frozen=True)
class Inputs:
    """What the model reads, [B, L] or [1, T], and which of its tokens are scored.

    Two rows 5 6|7 8 and 5 6|9 that share the prompt 5 6: ids 5 6 7 8 9, positions 0 1 2 3 2; the responses' tokens 7, 8 and 9 are the labels at
    1, 2 and 1: a token is scored by the output before it.
    """

    ids: Tensor
    sources_N: Tensor  # places among the flattened ids
    labels_N: Tensor
    positions: Tensor | None = None  # packed
    packing: AttentionPlan | None = None  # packed

    def to(self, device: torch.device) -> Inputs:
        positions = None if self.positions is None else self.positions.to(device)
        return Inputs(self.ids.to(device), self.sources_N.to(device), self.labels_N.to(device), positions, self.packing)


def pad_rows(rows: Sequence[Tensor], prompt_lengths: Sequence[int], selection: tuple[Tensor, Tensor]) -> Inputs:
    """``selection``: (row, place in its response) of each scored token."""
    ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    rows_N, tokens_N = selection
    sources_N = rows_N * ids.shape[1] + torch.tensor(prompt_lengths)[rows_N] + tokens_N - 1
    return Inputs(ids, sources_N, ids.flatten()[sources_N + 1])


def pack_rows(rows: Sequence[Tensor], prompt_lengths: Sequence[int], selection: tuple[Tensor, Tensor], prompts: Sequence[int] | None = None) -> Inputs:
    """``prompts``: a number for each row, the same for rows with equal prompts, which then share them; None: nothing is shared."""
    sequence = _Sequence()
    first = torch.zeros(len(rows), dtype=torch.long)  # where the first token of a row's response lies
    before = torch.zeros(len(rows), dtype=torch.long)  # where the output that scores it lies
    for alike in _alike(len(rows), prompts):
        i, size = alike[0], prompt_lengths[alike[0]]
        if len(alike) == 1:
            first[i] = sequence.append(rows[i]) + size
            before[i] = first[i] - 1
            continue
        start = sequence.append(rows[i][:size], alone=True)
        for i in alike:
            first[i] = sequence.append(rows[i][size:], size)
            before[i] = start + size - 1
    rows_N, tokens_N = selection
    ids = torch.cat(sequence.pieces)
    places_N = first[rows_N] + tokens_N
    sources_N = torch.where(tokens_N == 0, before[rows_N], places_N - 1)
    return Inputs(ids[None], sources_N, ids[places_N], torch.cat(sequence.positions)[None], AttentionPlan(sequence.runs))


class _Sequence:
    """A packed sequence as it grows."""

    def __init__(self) -> None:
        self.pieces: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.runs: list[Run] = []
        self._size = 0

    def append(self, ids: Tensor, num_prompt: int = 0, *, alone: bool = False) -> int:
        """A row, a prompt (``alone``), or a response to the last prompt; where its first token lies."""
        start = self._size
        self.pieces.append(ids)
        self.positions.append(torch.arange(num_prompt, num_prompt + len(ids)))
        if self.runs and self.runs[-1].num_prompt == num_prompt and not alone:
            self.runs[-1].lengths.append(len(ids))
        else:
            self.runs.append(Run(num_prompt, [len(ids)]))
        self._size += len(ids)
        return start


def _alike(num_rows: int, prompts: Sequence[int] | None) -> list[list[int]]:
    """Rows with equal prompts together, in order of their first."""
    groups: dict[int, list[int]] = {}
    for i in range(num_rows):
        groups.setdefault(i if prompts is None else prompts[i], []).append(i)
    return list(groups.values())

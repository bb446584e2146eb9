"""``RLHFDataset``: dataset rows for the one-process reference flow and for users of the DataLoader. Returns messages, never token ids."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import torch
from torch.utils.data import Dataset

from streamrl.config.data import DataConfig
from streamrl.data.files import Files
from streamrl.data.media import Row
from streamrl.data.rows import agent_row
from streamrl.data.table import RowTable, read_table
from streamrl.protocol.chat import ChatTokenizer

log = logging.getLogger(__name__)


class RLHFDataset(Dataset):
    """Rows of ``files`` in file order, subsampled and filtered as ``data`` says.

    ``dataset[i]`` is a fresh dict: all columns of the file but the media columns, whose values are parts of raw_prompt, plus raw_prompt,
    extra_info, index, tools_kwargs, interaction_kwargs and ``dummy_tensor`` (uint8 [1], carries nothing: it keeps the tensor side of a
    collated batch non-empty).
    Pickling keeps file names and settings, not rows: another process reads the files again on first use.
    """

    def __init__(self, files: Files, data: DataConfig, *, seed: int = 0, max_samples: int = -1, tokenizer: ChatTokenizer | None = None) -> None:
        self._files = files
        self._data = data
        self._seed = seed
        self._max_samples = max_samples
        self._tokenizer = tokenizer
        self._part: tuple[int, int] | None = None  # (first row, number of rows) of a split
        self._table: RowTable | None = self._read()

    def __len__(self) -> int:
        return len(self._rows())

    @property
    def sizes(self) -> list[int]:
        """Rows of each file; row numbers run through the files in their order."""
        return list(self._loaded().sizes)

    @property
    def fingerprint(self) -> str:
        """Equal for datasets of equal rows."""
        return self._loaded().fingerprint

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {**agent_row(self._rows()[i], self._data), "dummy_tensor": torch.tensor([0], dtype=torch.uint8)}

    def split(self, k: int) -> list[RLHFDataset]:
        """``k`` datasets of ``len // k`` consecutive rows; the rest is dropped and logged."""
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise ValueError(f"a dataset splits into a positive number of parts, got k={k!r}; pass an int of at least 1")
        if len(self) < k:
            raise ValueError(f"every part of a split has a row, got {len(self)} rows for {k} parts; ask for fewer parts")
        size = len(self) // k
        if len(self) % k:
            log.warning("split(%d) of %d rows drops the last %d", k, len(self), len(self) % k)
        return [self._slice(part * size, size) for part in range(k)]

    def resume_dataset_state(self) -> None:
        """Read the files now, after unpickling, instead of at the first access."""
        self._loaded()

    def _slice(self, start: int, size: int) -> RLHFDataset:
        part = object.__new__(type(self))
        offset = self._part[0] if self._part else 0
        part.__dict__ = {**self.__dict__, "_part": (offset + start, size), "_table": _cut(self._loaded(), start, size)}
        return part

    def _rows(self) -> list[Row]:
        return self._loaded().rows

    def _loaded(self) -> RowTable:
        if self._table is None:
            self._table = self._read()
        return self._table

    def _read(self) -> RowTable:
        table = read_table(self._files, self._data, seed=self._seed, max_samples=self._max_samples, tokenizer=self._tokenizer)
        return table if self._part is None else _cut(table, *self._part)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None}


def _cut(table: RowTable, start: int, size: int) -> RowTable:
    """``size`` rows from ``start`` on; of each file what lies in that range."""
    ends = list(itertools.accumulate(table.sizes))
    inside = [max(0, min(end, start + size) - max(end - rows, start)) for end, rows in zip(ends, table.sizes, strict=True)]
    return RowTable(table.data, table.rows[start : start + size], inside)

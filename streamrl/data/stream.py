"""The prompt source of a run: dataset rows, each with a uid, in a seeded order that never ends (or ends after ``total_epochs``).

The cursor is (epoch, position) and the order of an epoch depends on seed, epoch, file sizes and weights alone, so a stream restored onto the same
rows continues exactly where the saved one stood, at an epoch's end too; onto other rows it is refused (``cursor.py``). Guarantees each row once per
epoch, or with ``data.train_weights`` each file its share. Doesn't know which prompts were trained: that is the replay buffer's ledger.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from streamrl.config.data import DataConfig
from streamrl.data.cursor import check_cursor
from streamrl.data.custom import CustomTable
from streamrl.data.order import prompt_order
from streamrl.data.overlong import check_tokenizer
from streamrl.data.table import RowSource, check_mixture, read_table
from streamrl.errors import ConfigError
from streamrl.protocol.chat import ChatTokenizer
from streamrl.protocol.keys import prompt_uid
from streamrl.protocol.trajectory import Prompt


class PromptStream:
    """Implements ``PromptSource``. Rows are read at construction; the stream itself never blocks."""

    def __init__(self, data: DataConfig, *, run_seed: int, total_epochs: int | None, tokenizer: ChatTokenizer | None = None) -> None:
        check_tokenizer(data, tokenizer)
        if total_epochs is not None and total_epochs < 1:
            raise ConfigError(f"$.trainer.total_epochs: at least one epoch, got {total_epochs}; None is a stream without end")
        self._data = data
        self._run_seed = run_seed
        self._seed = run_seed if data.seed is None else data.seed
        self._total_epochs = total_epochs
        self._tokenizer = tokenizer
        self._rows = self._read(data.train_files, data, data.max_samples)
        self._num_rows = sum(self._rows.sizes)
        if data.train_weights is not None:
            check_mixture(self._rows.sizes, data.train_weights)
        self._identity = self._what_a_cursor_means()
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    async def num_prompts(self) -> int:
        """Rows of one epoch."""
        return self._num_rows

    async def next_prompts(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts, across epoch boundaries; fewer only at the end of the data (empty: no more)."""
        prompts: list[Prompt] = []
        while len(prompts) < count and not self._at_end():
            prompts.append(self._here())
            self._advance()
        return prompts

    async def validation_rows(self) -> list[dict[str, Any]]:
        """The validation rows in file order, none when no file is configured."""
        if not self._data.val_files:
            return []
        in_order = replace(self._data, shuffle=False, train_weights=None)
        rows = self._read(self._data.val_files, in_order, self._data.val_max_samples)
        return [rows.wire(i) for i in range(sum(rows.sizes))]

    async def state(self) -> dict[str, Any]:
        """The cursor, with what its meaning depends on."""
        return {"epoch": self._epoch, "position": self._position, **self._identity}

    async def restore(self, state: dict[str, Any]) -> None:
        """Continue at ``state``; CheckpointError when rows, order or names would not be those of the saved run."""
        self._epoch, self._position = check_cursor(state, self._identity, place="position", limit=self._num_rows)
        if self._position == self._num_rows:
            self._epoch, self._position = self._epoch + 1, 0
        self._order = self._order_of(self._epoch)

    def _what_a_cursor_means(self) -> dict[str, Any]:
        return {
            "num_rows": self._num_rows,
            "sizes": self._rows.sizes,
            "weights": self._data.train_weights,
            "seed": self._seed,
            "run_seed": self._run_seed,
            "shuffle": self._data.shuffle,
            "fingerprint": self._rows.fingerprint,
        }

    def _read(self, files: str | list[str], data: DataConfig, max_samples: int) -> RowSource:
        read = read_table if data.custom_cls is None else CustomTable
        return read(files, data, seed=self._seed, max_samples=max_samples, tokenizer=self._tokenizer)

    def _order_of(self, epoch: int) -> list[int]:
        return prompt_order(self._rows.sizes, self._data.train_weights, shuffle=self._data.shuffle, seed=self._seed, epoch=epoch)

    def _at_end(self) -> bool:
        return self._total_epochs is not None and self._epoch >= self._total_epochs

    def _here(self) -> Prompt:
        row = self._rows.wire(self._order[self._position])
        return Prompt(prompt_uid(self._run_seed, self._epoch, self._position), row, self._epoch, self._position)

    def _advance(self) -> None:
        """The cursor rests on the next row to hand out: after an epoch's last row that is row 0 of the next epoch."""
        self._position += 1
        if self._position == self._num_rows:
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)

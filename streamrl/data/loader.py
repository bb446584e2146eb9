"""Batches of an ``RLHFDataset`` for the one-process reference flow; a thin wrapper of torchdata's StatefulDataLoader.

Visits rows in the order of the prompt stream (``prompt_order``), so both hand out the same rows. Iterating once is one epoch; the next
iteration starts the next epoch with its own permutation. ``state_dict`` restores the position inside an epoch exactly, onto a loader of the same
rows, order and batches only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from streamrl.data.collate import collate_fn
from streamrl.data.cursor import check_cursor
from streamrl.data.dataset import RLHFDataset
from streamrl.data.order import prompt_order
from streamrl.data.table import check_mixture

log = logging.getLogger(__name__)


class PromptLoader:
    """``for batch in loader`` is one epoch of collated batches; the last incomplete batch is dropped and logged when ``drop_last``."""

    def __init__(
        self,
        dataset: RLHFDataset,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        weights: list[float] | None = None,  # one per file, as data.train_weights
        drop_last: bool = True,
        num_workers: int = 0,
    ) -> None:
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise ValueError(f"a batch has at least one row, got batch_size={batch_size!r}; pass an int of at least 1")
        if drop_last and len(dataset) < batch_size:
            raise ValueError(f"a data set fills at least one batch, got {len(dataset)} rows for batches of {batch_size}; lower the batch size")
        if weights is not None:
            check_mixture(dataset.sizes, weights)
        self._dataset = dataset
        self._weights = weights
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._num_workers = num_workers
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._batches = 0  # yielded in this epoch
        if drop_last and len(dataset) % batch_size:
            log.warning("batches of %d drop the last %d of %d rows of every epoch", batch_size, len(dataset) % batch_size, len(dataset))

    @property
    def epoch(self) -> int:
        """0-based; moves on after an epoch's last batch."""
        return self._epoch

    def __len__(self) -> int:
        full, rest = divmod(len(self._dataset), self._batch_size)
        return full + bool(rest and not self._drop_last)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        order = prompt_order(self._dataset.sizes, self._weights, shuffle=self._shuffle, seed=self._seed, epoch=self._epoch)
        loader = StatefulDataLoader(
            self._dataset,
            batch_size=self._batch_size,
            sampler=order[self._batches * self._batch_size :],
            drop_last=self._drop_last,
            collate_fn=collate_fn,
            num_workers=self._num_workers,
        )
        for batch in loader:
            self._batches += 1
            if self._batches == len(self):  # before the yield: a state saved after the last batch is the next epoch's start
                self._epoch += 1
                self._batches = 0
            yield batch
            if self._batches == 0:
                return

    def state_dict(self) -> dict[str, Any]:
        """The place, with what its meaning depends on."""
        return {"epoch": self._epoch, "batches": self._batches, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at ``state``; CheckpointError when rows, order or batches would not be those of the saved loader."""
        self._epoch, self._batches = check_cursor(state, self._identity(), place="batches", limit=len(self) - 1)

    def _identity(self) -> dict[str, Any]:
        return {
            "num_rows": len(self._dataset),
            "sizes": self._dataset.sizes,
            "weights": self._weights,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "batch_size": self._batch_size,
            "drop_last": self._drop_last,
            "fingerprint": self._dataset.fingerprint,
        }

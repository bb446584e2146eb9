"""Learner actor: one FSDP rank. Its collectives run in a thread, so that health questions are answered meanwhile."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from actors.host import Host
from actors.store import adoptable, store_client
from streamrl.dataplane.sweep import open_folder, sweep
from streamrl.errors import WeightMismatch
from streamrl.pipeline import build
from streamrl.pipeline.learner_group import Threaded
from streamrl.protocol.interfaces import Learner
from streamrl.weights.files import snapshot_path


class LearnerActor(Host):
    """Serves ``Learner``; the trainer calls all ranks together."""

    async def open(self, peers: dict[str, Any]) -> None:
        self._closed = asyncio.Event()
        self.threaded: Threaded | None = None
        number = int(self.name.rsplit("-", 1)[1])
        self.weights_dir = build.weights_dir(self.config, self.folder.run_id, self.places.weights_mark("learner-0"))
        if self.is_away and number == 0:
            sweep(Path(self.config.dataplane.shm_dir), keep=adoptable(self.folder))
            open_folder(self.weights_dir, os.getpid(), self.settings.life)
        store = store_client(self, peers)
        self.rank = await asyncio.to_thread(build.build_rank, self.config, store, self.weights_dir, self.folder.samples, number, self.metrics)

    async def rendezvous(self, host: str) -> str:
        """Rank 0: an address at which all ranks meet."""
        return await asyncio.to_thread(self.rank.open_rendezvous, host)

    async def join(self, address: str) -> Any:
        """Meet the other ranks, load and shard the model."""
        with self.metrics.state("start"):
            return await self._guarded(self._join(address))

    async def _join(self, address: str) -> None:
        await asyncio.to_thread(self.rank.start, address)
        self.threaded = Threaded(self.rank, self.waits)
        await self.serve(Learner, self.threaded)

    async def snapshot_bytes(self, version: int, offset: int, num_bytes: int) -> np.ndarray:
        """A part of a snapshot's file, for another node."""
        return await asyncio.to_thread(_read, snapshot_path(self.weights_dir, version), offset, num_bytes)

    async def work(self) -> None:
        with self.metrics.state("wait_data"):  # whenever no call runs
            await self._closed.wait()

    async def close(self) -> None:
        if self.threaded is not None:
            self.threaded.close()
        if self.is_away and self.name == "learner-0":
            shutil.rmtree(self.weights_dir, ignore_errors=True)
        self._closed.set()


def _read(path: Path, offset: int, num_bytes: int) -> np.ndarray:
    try:
        data = np.fromfile(path, np.uint8, num_bytes, offset=offset)
    except FileNotFoundError:
        raise WeightMismatch(f"a version is fetched while it is one of the newest, got {path.name} which was retired; the replica takes the next one") from None
    if data.nbytes != num_bytes:
        raise WeightMismatch(f"a snapshot has the bytes of its manifest, got {data.nbytes} of {num_bytes} at {offset} of {path.name}; publish again")
    return data

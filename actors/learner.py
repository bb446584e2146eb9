"""Learner actor: one FSDP rank. Its collectives run in a thread, so that health questions are answered meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.host import Host
from actors.store import store_client
from streamrl.pipeline import build
from streamrl.pipeline.learner_group import Threaded
from streamrl.protocol.interfaces import Learner


class LearnerActor(Host):
    """Serves ``Learner``; the trainer calls all ranks together."""

    async def open(self, peers: dict[str, Any]) -> None:
        self._closed = asyncio.Event()
        self.threaded: Threaded | None = None
        number = int(self.name.rsplit("-", 1)[1])
        store = store_client(peers["store"], self.name, self.config, self.folder)
        weights_dir = build.weights_dir(self.config, self.folder.run_id)
        self.rank = await asyncio.to_thread(build.build_rank, self.config, store, weights_dir, self.folder.samples, number)

    async def rendezvous(self, host: str) -> str:
        """Rank 0: an address at which all ranks meet."""
        return await asyncio.to_thread(self.rank.open_rendezvous, host)

    async def join(self, address: str) -> Any:
        """Meet the other ranks, load and shard the model."""
        return await self._guarded(self._join(address))

    async def _join(self, address: str) -> None:
        await asyncio.to_thread(self.rank.start, address)
        self.threaded = Threaded(self.rank)
        await self.serve(Learner, self.threaded)

    async def work(self) -> None:
        await self._closed.wait()

    async def close(self) -> None:
        if self.threaded is not None:
            self.threaded.close()
        self._closed.set()

"""Replay actor: the one owner of group states, leases and the ledger. A new one goes on where the journal ends."""

from __future__ import annotations

from typing import Any

from actors.host import Host
from actors.store import store_client
from streamrl.pipeline import build
from streamrl.pipeline.metering import ReplayMeter
from streamrl.protocol.interfaces import Replay


class ReplayActor(Host):
    """Runs the buffer's timers; serves ``Replay``."""

    async def open(self, peers: dict[str, Any]) -> None:
        store = store_client(self, peers)
        self.replay = build.build_replay(self.config, store, self.folder.ledger)
        self.meter = ReplayMeter(self.metrics, self.config.replay.max_staleness)
        await self.serve(Replay, self.replay)

    async def work(self) -> None:
        await self.replay.run_timers()

    async def health(self) -> bytes:
        self.meter.export(await self.replay.stats())
        return await super().health()

    async def close(self) -> None:
        await self.replay.close()

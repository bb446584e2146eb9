"""Replay actor: the one owner of group states, leases and the ledger. A new one goes on where the journal ends."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.host import Host
from actors.store import store_client
from streamrl.pipeline import build
from streamrl.pipeline.health import Facts
from streamrl.pipeline.metering import ReplayMeter, export_every
from streamrl.protocol.clock import SystemClock
from streamrl.protocol.interfaces import Replay
from streamrl.telemetry.run_folder import list_quarantined


class ReplayActor(Host):
    """Runs the buffer's timers; serves ``Replay``."""

    async def open(self, peers: dict[str, Any]) -> None:
        store = store_client(self, peers)
        self.replay = build.build_replay(self.config, store, self.folder.ledger)
        self.meter = ReplayMeter(self.metrics, self.config.replay.max_staleness)
        self._num_listed = 0
        await self.serve(Replay, self.replay)

    async def work(self) -> None:
        exporting = asyncio.create_task(export_every(self._export, SystemClock()))
        try:
            await self.replay.run_timers()
            await self._export()  # how it ended, for the last scrape
        finally:
            exporting.cancel()

    async def _export(self) -> None:
        self.meter.export(await self.replay.stats())
        names = self.replay.quarantined()
        if len(names) > self._num_listed and list_quarantined(self.folder, names):
            self._num_listed = len(names)

    async def facts(self) -> Facts:
        return Facts(replay=self.replay.facts())

    async def close(self) -> None:
        await self.replay.close()

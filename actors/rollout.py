"""Rollout actor: one engine replica and the agent loops that use it."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.host import Host
from actors.remote import client
from actors.store import store_client
from streamrl.pipeline import build
from streamrl.pipeline.loops import POLL_S, generate_groups, keep_leases
from streamrl.pipeline.replica import EngineReplica
from streamrl.protocol.clock import SystemClock
from streamrl.protocol.interfaces import LeaseSource, Replica, SessionRunner


class RolloutActor(Host):
    """Runs ``generate_groups`` and ``keep_leases``; serves ``Replica``."""

    async def open(self, peers: dict[str, Any]) -> None:
        self.runner: SessionRunner | None = None
        self.engine = build.build_engine(self.config, self.name)
        limit_s = self.config.rollout.timeouts.start_s
        await self.waits.limit(self.engine.start(), "the engine's start", f"{self.name} engine", limit_s)
        self.record_children(self.engine.child_pids())
        self.runner = build.build_runner(self.config, self.engine)
        patience_s = self.config.cluster.restart_patience_s
        self.worker = build.build_worker(
            self.config,
            self.name,
            replay=client(peers["replay"], "replay", LeaseSource, limit_s=POLL_S + patience_s, folder=self.folder, patience_s=patience_s),
            store=store_client(peers["store"], self.name, self.config, self.folder),
            runner=self.runner,
            engine=self.engine,
            waits=self.waits,
            metrics=self.metrics,
        )
        await self.serve(Replica, EngineReplica(self.name, self.engine, self.runner))

    async def work(self) -> None:
        self.record_children(self.engine.child_pids())
        beats = asyncio.create_task(keep_leases(self.worker, self.config.replay, SystemClock()))
        groups = asyncio.create_task(generate_groups(self.worker, n=self.config.rollout.n))
        try:
            await asyncio.wait({beats, groups}, return_when=asyncio.FIRST_COMPLETED)
            await (groups if groups.done() else beats)
        finally:
            beats.cancel()
            groups.cancel()

    async def close(self) -> None:
        if self.runner is not None:
            await self.runner.close()
        await self.engine.stop()

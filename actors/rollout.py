"""Rollout actor: one engine replica and the agent loops that use it."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.host import Host
from actors.remote import client
from actors.store import NodeCalls, store_client
from streamrl.pipeline import build
from streamrl.pipeline.health import EngineWatch, Facts, rollout_facts
from streamrl.pipeline.loops import POLL_S, GroupWorker, LeaseGate, generate_groups, keep_leases, tell_the_rest
from streamrl.pipeline.replica import EngineReplica, Nearby
from streamrl.protocol.clock import SystemClock
from streamrl.protocol.interfaces import LeaseSource, Replica, SessionRunner

SESSIONS_END_S = 5.0


class RolloutActor(Host):
    """Runs ``generate_groups`` and ``keep_leases``; serves ``Replica``."""

    async def open(self, peers: dict[str, Any]) -> None:
        self.runner: SessionRunner | None = None
        self._groups: asyncio.Task[None] | None = None
        self._closing = False
        self.metrics.include("vllm:")  # vLLM keeps its metrics in the default registry of this process
        self.engine = build.build_engine(self.config, self.name)
        self.runner = build.build_runner(self.config, self.engine, self.metrics)  # before the engine starts: it finds what is wrong with tools and loops
        limit_s = self.config.rollout.timeouts.start_s
        await self.waits.limit(self.engine.start(), "the engine's start", f"{self.name} engine", limit_s)
        await self.waits.limit(self.runner.start(), "the start of what scores sessions", f"{self.name} judge", limit_s)
        self.record_children(self._child_pids())
        patience_s = self.config.cluster.restart_patience_s
        gate = LeaseGate()
        self._watch = EngineWatch(self.engine)
        self.worker = build.build_worker(
            self.config,
            self.name,
            replay=client(peers["replay"], "replay", LeaseSource, limit_s=POLL_S + patience_s, folder=self.folder, patience_s=patience_s),
            store=store_client(self, peers),
            runner=self.runner,
            engine=self.engine,
            waits=self.waits,
            metrics=self.metrics,
            node=self._near if len(self.places.used()) > 1 else None,
            gate=gate,
        )
        await self.serve(Replica, EngineReplica(self.name, self.engine, self.runner, gate, self._copies(peers), self.waits, self.metrics, self.worker.spent))

    def _child_pids(self) -> list[int]:
        assert self.runner is not None
        return [*self.engine.child_pids(), *self.runner.child_pids()]

    @property
    def _near(self) -> str:
        near = self.places.store_near(self.name)
        assert near is not None, "a node with rollout actors has a store"
        return near

    def _copies(self, peers: dict[str, Any]) -> Nearby | None:
        """Snapshots that are made on another node come by way of this node's store."""
        if self.places.node_of("learner-0") == self.places.node_of(self.name):
            return None
        limit_s = self.config.weights.publish_timeout_s + 30  # the publisher's own deadline comes first
        near: NodeCalls = client(peers[self._near], self._near, NodeCalls, limit_s=limit_s, folder=self.folder)
        return near.copy_weights

    async def work(self) -> None:
        self.record_children(self._child_pids())
        beats = asyncio.create_task(keep_leases(self.worker, self.config.replay, SystemClock()))
        groups = self._groups = asyncio.create_task(generate_groups(self.worker, n=self.config.rollout.n))
        try:
            await asyncio.wait({beats, groups}, return_when=asyncio.FIRST_COMPLETED)
            if not self._closing:
                await (groups if groups.done() else beats)
        finally:
            beats.cancel()
            groups.cancel()

    async def facts(self) -> Facts:
        worker: GroupWorker | None = getattr(self, "worker", None)  # None while it opens
        return Facts() if worker is None else Facts(rollout=rollout_facts(worker, self.engine, self._watch))

    async def close(self) -> None:
        """Sessions end before the engine they use, so that its end is no failure of theirs."""
        self._closing = True
        if self._groups is not None:
            self._groups.cancel()
            await asyncio.wait({self._groups}, timeout=SESSIONS_END_S)
        if self.runner is not None:
            await self.runner.close()
        await self.engine.stop()
        if self._groups is not None:
            await tell_the_rest(self.worker)

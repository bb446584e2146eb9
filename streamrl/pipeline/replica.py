"""A serving replica as publisher and validator see it: an engine under a name, with the runner that scores its answers.

Its rollout worker leases no group while the replica validates ``alone``: it keeps an older version then, and rows of it would be wasted (``LeaseGate``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import nullcontext

from streamrl.pipeline.loops import LeaseGate
from streamrl.protocol.interfaces import Engine, SessionRunner
from streamrl.protocol.validation import ValQuestion, ValResult
from streamrl.protocol.weights import WeightManifest, WeightReport

Nearby = Callable[[WeightManifest], Awaitable[WeightManifest]]  # the manifest of a copy that this node can read


class EngineReplica:
    """Implements ``Replica`` over an engine in this process. ``nearby``: where snapshots come from another node."""

    def __init__(self, name: str, engine: Engine, runner: SessionRunner, gate: LeaseGate, nearby: Nearby | None = None) -> None:
        self.name = name
        self._engine = engine
        self._runner = runner
        self._gate = gate
        self._nearby = nearby

    async def update_weights(self, manifest: WeightManifest) -> WeightReport:
        return await self._engine.update_weights(manifest if self._nearby is None else await self._nearby(manifest))

    async def evaluate(self, questions: list[ValQuestion], alone: bool = False) -> list[ValResult]:
        with self._gate.closed() if alone else nullcontext():
            results = await self._runner.evaluate(questions)
        self._engine.check()  # what a broken engine failed to answer says nothing about the policy
        return results

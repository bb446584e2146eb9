"""A serving replica as publisher and validator see it: an engine under a name, with the runner that scores its answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from streamrl.protocol.interfaces import Engine, SessionRunner
from streamrl.protocol.weights import WeightManifest, WeightReport

Nearby = Callable[[WeightManifest], Awaitable[WeightManifest]]  # the manifest of a copy that this node can read


class EngineReplica:
    """Implements ``Replica`` over an engine in this process. ``nearby``: where snapshots come from another node."""

    def __init__(self, name: str, engine: Engine, runner: SessionRunner, nearby: Nearby | None = None) -> None:
        self.name = name
        self._engine = engine
        self._runner = runner
        self._nearby = nearby

    async def update_weights(self, manifest: WeightManifest) -> WeightReport:
        return await self._engine.update_weights(manifest if self._nearby is None else await self._nearby(manifest))

    async def evaluate(self, rows: list[dict[str, Any]]) -> list[float]:
        scores = await self._runner.evaluate(rows)
        self._engine.check()  # what a broken engine failed to answer says nothing about the policy
        return scores

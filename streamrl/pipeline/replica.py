"""A serving replica as publisher and validator see it: an engine under a name, with the runner that scores its answers.

Its rollout worker leases no group while the replica validates ``alone``: it keeps an older version then, and rows of it would be wasted (``LeaseGate``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import nullcontext

from streamrl.errors import EngineError, ProbeMismatch, StreamrlError, WeightMismatch
from streamrl.pipeline.loops import LeaseGate
from streamrl.pipeline.metering import meter_load
from streamrl.pipeline.spending import SpentReport
from streamrl.protocol.interfaces import Engine, SessionRunner
from streamrl.protocol.spending import counted
from streamrl.protocol.validation import ValQuestion, ValResult
from streamrl.protocol.waits import WaitTable, shown
from streamrl.protocol.weights import WeightManifest, WeightReport
from streamrl.telemetry.metrics import Metrics, NullMetrics

Nearby = Callable[[WeightManifest], Awaitable[WeightManifest]]  # the manifest of a copy that this node can read


class EngineReplica:
    """Implements ``Replica`` over an engine in this process. ``nearby``: where snapshots come from another node."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        runner: SessionRunner,
        gate: LeaseGate,
        nearby: Nearby | None = None,
        waits: WaitTable | None = None,
        metrics: Metrics | None = None,
        spent: SpentReport | None = None,
    ) -> None:
        self.name = name
        self._engine = engine
        self._runner = runner
        self._gate = gate
        self._nearby = nearby
        self._waits = waits or WaitTable(name)
        self._metrics = metrics or NullMetrics()
        self._spent = spent  # None: nobody keeps books

    async def update_weights(self, manifest: WeightManifest) -> WeightReport:
        with self._waits.activity(f"version {manifest.version}"), self._metrics.state("weight_sync"):
            if self._nearby is not None:
                with shown("a copy of the weights", "store"):
                    manifest = await self._nearby(manifest)
            running = self._metrics.blocks_in("generate")
            try:
                with shown("the new weights", "engine"):
                    report = await self._engine.update_weights(manifest)
            except (WeightMismatch, EngineError) as error:
                self._metrics.inc("streamrl_weight_sync_failures_total", reason=_reason(error))
                raise
        meter_load(self._metrics, manifest, report, running, "shm" if self._nearby is None else "ray")
        return report

    async def evaluate(self, questions: list[ValQuestion], alone: bool = False) -> list[ValResult]:
        with self._gate.closed() if alone else nullcontext(), self._waits.activity(f"validation ({len(questions)} rows)"):
            with counted() as tokens:
                results = await self._runner.evaluate(questions)
        if self._spent is not None:
            self._spent.evaluated(tokens.evaluation)
            await self._spent.hand_over()
        self._engine.check()  # what a broken engine failed to answer says nothing about the policy
        return results


def _reason(error: StreamrlError) -> str:
    if isinstance(error, WeightMismatch):
        return "probe" if isinstance(error, ProbeMismatch) else "mismatch"
    return "engine"

"""The trainer: takes complete groups, has the learner ranks score, judge and learn them, and publishes what came out.

It is a dispatcher: it holds keys, tags and manifests, and never imports torch. One step in order (``Trainer.step``; the stages are those of ``stages.py``):

    take ► judge ► [previous publication done] ► bound checked again ► learn ► commit ► publish in the background

A step that trains the critic alone, or whose policy update was skipped, makes no version: its commit frees the slots of its groups.

Guarantees kept here, by name: no optimizer step starts before the previous version is published, so the trainer is never more than one
version ahead (``await_publication``); no group above the bound is trained (``replay.take`` and ``_drop_stale``); a version number is
never given to two sets of weights, also after a resume (``prepare``, ``snapshot``); what is saved is never "weights after the step,
buffer before it" (``upkeep.py``); a step that this process began and did not end is ended once by its successor (``succession.py``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from streamrl.config import Config
from streamrl.errors import Closed, ProtocolError
from streamrl.pipeline import succession, upkeep
from streamrl.pipeline.aside import Aside
from streamrl.pipeline.checkpoints import Checkpoints, TrainerState
from streamrl.pipeline.loops import cancel_all
from streamrl.pipeline.metering import meter_step
from streamrl.pipeline.records import StepRecord, Totals
from streamrl.pipeline.stages import Stages
from streamrl.pipeline.standing import OpenStep, Standing
from streamrl.pipeline.validation import Validator
from streamrl.protocol.groups import TakenBatch
from streamrl.protocol.interfaces import BatchSource, LearnerGroup
from streamrl.protocol.keys import TrajectoryKey
from streamrl.protocol.learn import StepUpdates, UpdateReport
from streamrl.protocol.meta import KVBatchMeta
from streamrl.protocol.waits import WaitTable
from streamrl.protocol.weights import WeightManifest
from streamrl.replay import staleness
from streamrl.telemetry.metrics import Metrics
from streamrl.weights.publisher import WeightPublisher

log = logging.getLogger(__name__)
T = TypeVar("T")


class Trainer:
    """Runs the steps of one training job over interfaces; knows neither Ray nor tensors."""

    def __init__(
        self,
        config: Config,
        *,
        replay: BatchSource,
        learner: LearnerGroup,
        publisher: WeightPublisher,
        validator: Validator,
        checkpoints: Checkpoints,
        total_steps: int,
        record: Callable[[StepRecord], None],
        waits: WaitTable,
        metrics: Metrics,
        keep: Callable[[Standing], None] = lambda standing: None,
    ) -> None:
        self.config = config
        self.replay = replay
        self.learner = learner
        self.publisher = publisher
        self.validator = validator
        self.checkpoints = checkpoints
        self.total_steps = total_steps
        self.record = record
        self.waits = waits
        self.metrics = metrics
        self.keep = keep  # writes down where this trainer stands, for a successor
        self.stages = Stages(config, learner, self.call, total_steps)
        self.state = TrainerState()
        self.totals = Totals()
        self.manifest: WeightManifest | None = None  # of the newest version
        self._goes_on: Standing | None = None  # what a predecessor left, until ``run`` has dealt with it
        self.validating, self.saving = Aside(), Aside()  # what goes on beside the steps
        self._publication: asyncio.Task[None] | None = None
        self.stopping = asyncio.Event()
        self._wait_data_s = 0.0
        metrics.set("streamrl_staleness_bound_versions", config.replay.max_staleness)

    def stop(self) -> None:
        """End in order: finish the step under way, publish, save, close. Idempotent."""
        self.stopping.set()

    async def run(self) -> Totals:
        """Consumes complete groups; produces weight versions, one record a step and checkpoints; waits for batches and publications."""
        try:
            if self._goes_on is not None:
                standing, self._goes_on = self._goes_on, None
                await succession.go_on(self, standing)
            if self.config.trainer.val_before_train and self.state.step == 0 and not self.totals.val_accuracies:
                await upkeep.validate(self, every_replica=True)
                self.write_standing()
            while self.state.step < self.total_steps and not self.stopping.is_set():
                if not await self._step_unless_stopped():
                    break
            await self.await_publication()
            if self.stopping.is_set():
                await self.replay.new_learner()  # a batch that was leased just when the stop came is nobody's: ready again, and saved as such
            await upkeep.finish(self)
            await self.replay.close()
            self.totals.close(await self.replay.stats())
        finally:  # after an error the buffer stays as it is: the host decides whether the run goes on
            await cancel_all(self._beside())
        return self.totals

    async def prepare(self) -> None:
        """Before any loop runs: restore if asked, then publish the starting weights. Version 0 proves the delivery path to every engine."""
        restored = await self.checkpoints.restore(self.learner, self.replay)
        if restored is not None:
            self.state = restored
            self.totals = Totals.restored(restored.totals)
        self.totals.begin(await self.replay.stats())
        self.state.version = max(self.state.version, self.checkpoints.highest_version())
        await self._publish(await self.snapshot())  # restored weights get a number of their own
        self.write_standing()

    async def recall(self, standing: Standing) -> None:
        """In place of ``prepare`` when another process trained until now, and the learner went on. Replicas join next, then ``run``."""
        self._goes_on = standing
        await succession.recall(self, standing)

    async def fall_back(self, standing: Standing) -> None:
        """In place of ``prepare`` when the learner ranks are new ones and all others went on. Replicas join next, then ``run``."""
        self._goes_on = await succession.fall_back(self, standing)

    def write_standing(self, step: OpenStep | None = None) -> None:
        assert self.manifest is not None, "a version is published before anything is trained"
        self.keep(Standing(self.state, self.totals, self.manifest, step))

    async def _step_unless_stopped(self) -> bool:
        """One step; False when the stop signal came while waiting for its batch, or when no batch will come."""
        try:
            batch = await self._take()
        except Closed as closed:
            log.info("training ends before its last step: %s", closed)
            return False
        if batch is None:
            return False
        for lag in batch.lags:
            self.metrics.observe("streamrl_staleness_versions", lag, stage="admit")
        await self.step(batch)
        return True

    async def _take(self) -> TakenBatch | None:
        """The next batch, or None when the stop signal came first (a lease taken after that is in the snapshot as untrained)."""
        limit_s = self.config.replay.take_timeout_s
        started = time.monotonic()
        try:
            with self.waits.waiting("a batch of complete groups", "replay", limit_s), self.metrics.state("wait_data"):
                return await self._unless_stopped(self.replay.take(self.config.data.train_batch_size, limit_s))
        finally:
            self._wait_data_s = time.monotonic() - started

    async def _unless_stopped(self, call: Awaitable[T]) -> T | None:
        """What the call gives, or None when the stop signal came first. What fails meanwhile beside it raises here: no batch may ever come then."""
        task, stopped = asyncio.ensure_future(call), asyncio.ensure_future(self.stopping.wait())
        try:
            while not task.done() and not stopped.done():
                await asyncio.wait({task, stopped, *self._beside()}, return_when=asyncio.FIRST_COMPLETED)
                if self._publication is not None and self._publication.done():
                    await self.await_publication()
                self.validating.look()
                self.saving.look()
            return task.result() if task.done() else None
        finally:
            task.cancel()
            stopped.cancel()

    async def step(self, batch: TakenBatch) -> None:
        """Train one batch; the lease ends as trained or as dropped(skipped_step)."""
        started = time.monotonic()
        self.state.step += 1
        batch.meta.extra_info = {**(batch.meta.extra_info or {}), "global_step": self.state.step, "version": self.state.version}
        judged = await self.stages.judge(batch.meta)
        await self.await_publication()
        meta, lags = await self._drop_stale(batch)
        kept = set(meta.keys)
        rejected = sorted({TrajectoryKey.parse(key).uid for key, rule in judged.rejected if rule == "group_too_small" and key in kept})
        begun = OpenStep(batch.lease_id, meta, lags, rejected, judged.metrics)
        self.write_standing(begun)
        await self.complete(begun, None, started)
        await upkeep.after_step(self)

    async def complete(self, step: OpenStep, done: StepUpdates | None, started: float) -> None:
        """The updates that are not ``done``, and what follows them. Until ``write_standing`` a successor does all of it again, with the same end; from then
        on it only announces the version."""
        updates = await self.stages.learn(step.meta, self.state.step, done)
        manifest = await self._settle(step, updates)
        await self._report(step, updates.total(), time.monotonic() - started)
        self.write_standing()
        if manifest is not None:
            self._publication = asyncio.create_task(self._publish(manifest), name=f"publish {manifest.version}")

    async def _drop_stale(self, batch: TakenBatch) -> tuple[KVBatchMeta, list[int]]:
        """The bound once more, just before the first optimizer step: publication may have moved since the take."""
        meta, stale = batch.meta, set(await self.replay.check_bound(batch.lease_id))
        if stale:
            log.warning("%d of %d groups passed the staleness bound while they waited; they are dropped", len(stale), len(batch.uids))
            meta = meta.select_keys([key for key in meta.keys if TrajectoryKey.parse(key).uid not in stale])
        lags = group_lags(meta, self.state.published)
        self._assert_bound(lags)
        return meta, lags

    def _assert_bound(self, lags: list[int]) -> None:
        """Whoever let such a group through: it is counted, and never trained."""
        bound = self.config.replay.max_staleness
        over = [lag for lag in lags if lag > bound]
        if over:
            self.metrics.inc("streamrl_staleness_violations_total", len(over))
            raise ProtocolError(f"no group above max_staleness={bound} is trained, got lags {over} after the last check; this is a bug of the replay buffer")

    async def _settle(self, step: OpenStep, updates: StepUpdates) -> WeightManifest | None:
        """End the lease; a new version exists only when the policy moved. Too many skips in a row are the learner's to refuse."""
        if updates.total().applied == 0:
            await self.replay.skip(step.lease_id)
            return None
        manifest = await self.snapshot() if updates.moved_policy else None
        await self.replay.commit(step.lease_id, step.rejected, manifest is not None)
        return manifest

    async def snapshot(self) -> WeightManifest:
        """The learner's weights under the next version number, which is written down as used before they leave the learner."""
        self.state.version += 1
        self.checkpoints.claim_version(self.state.version)
        self.manifest = await self.call(self.learner.snapshot(self.state.version), f"a snapshot of version {self.state.version}", "publish")
        return self.manifest

    async def _publish(self, manifest: WeightManifest) -> None:
        """Hand a version to every serving replica, then free the slots of what was trained into it."""
        started = time.monotonic()
        with self.waits.waiting(f"version {manifest.version} on all replicas", "rollout actors", self.config.weights.publish_timeout_s):
            reports = await self.publisher.publish(manifest)
        self.state.published = manifest.version
        await self.replay.published(manifest.version)
        self.metrics.set("streamrl_weight_version", manifest.version)
        self.metrics.observe("streamrl_weight_sync_seconds", time.monotonic() - started, stage="publish")
        self.metrics.set("streamrl_weight_last_sync_timestamp_seconds", time.time())
        log.info("version %d is served by %d replicas after %.2f s", manifest.version, len(reports), time.monotonic() - started)

    def _beside(self) -> list[asyncio.Task[None]]:
        """What goes on beside the steps just now."""
        return [task for task in (self._publication, self.validating.task, self.saving.task) if task is not None]

    async def await_publication(self) -> None:
        if self._publication is not None:
            task, self._publication = self._publication, None
            with self.metrics.state("weight_sync"):
                await task

    async def _report(self, step: OpenStep, update: UpdateReport, seconds: float) -> None:
        record = self.totals.step(
            step=self.state.step,
            version=self.state.version,
            meta=step.meta,
            lags=step.lags,
            metrics=step.metrics | update.metrics,
            update=update,
            stats=await self.replay.stats(),
            seconds=seconds,
            wait_data_s=self._wait_data_s,
        )
        meter_step(self.metrics, record, update)
        self.record(record)

    async def call(self, call: Awaitable[T], what: str, state: str) -> T:
        """A learner stage under its deadline: a rank that hangs in a collective ends the run with the stage's name. ``state``: what the trainer's time is."""
        with self.metrics.state(state):
            return await self.waits.limit(call, what, "learner", self.config.learner.step_timeout_s)


def group_lags(meta: KVBatchMeta, published: int) -> list[int]:
    """Versions between the oldest token of each group and the published one, groups in batch order.

    Computed anew and not advanced from the take: a replica that took a version up early yields tokens newer than the published version.
    """
    oldest: dict[str, int] = {}
    for key, tag in zip(meta.keys, meta.tags, strict=True):
        uid = TrajectoryKey.parse(key).uid
        oldest[uid] = min(oldest.get(uid, tag["min_global_steps"]), tag["min_global_steps"])
    return [staleness.lag(published, version) for version in oldest.values()]

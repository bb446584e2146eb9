"""Trainer actor: dispatches the steps of the run over keys and tags. It never imports torch."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from ray.actor import ActorHandle

from actors.host import Host, WireError
from actors.remote import client
from streamrl.errors import WaitTimeout, to_wire
from streamrl.pipeline import build
from streamrl.pipeline.health import Facts, trainer_facts
from streamrl.pipeline.learner_group import RankGroup
from streamrl.pipeline.records import RecordWindow, StepRecord, Totals
from streamrl.pipeline.standing import Standing, read_standing, write_standing
from streamrl.pipeline.trainer import Trainer
from streamrl.protocol.interfaces import BatchSource, Learner, PromptSource, Replica
from streamrl.weights.publisher import WeightPublisher

log = logging.getLogger(__name__)


class Progress(msgspec.Struct, frozen=True):
    """What the driver shows: records it has not seen yet, the totals so far, and the error of each replica that failed a publication, until it is detached."""

    records: list[StepRecord]
    totals: Totals
    failed_replicas: dict[str, WireError]
    weight_version: int
    total_steps: int = 0  # of the whole run, as the configuration and the data give it


class TrainerActor(Host):
    """Runs ``Trainer.run``; replicas join and leave while it runs."""

    async def open(self, peers: dict[str, Any]) -> None:
        config = self.config
        peer = partial(client, folder=self.folder)
        patient = partial(peer, patience_s=config.cluster.restart_patience_s)
        prompts = patient(peers["prompt"], "prompt", PromptSource, limit_s=config.cluster.start_timeout_s)  # it reads the validation files when asked
        learners = [peer(handle, name, Learner, limit_s=config.learner.step_timeout_s + 30) for name, handle in peers.items() if name.startswith("learner-")]
        self._records = RecordWindow()
        self._failed: dict[str, WireError] = {}
        self.publisher = WeightPublisher(config.weights, on_failure=self._replica_failed)
        resume = Path(self.settings.resume) if self.settings.resume else None
        self.trainer = Trainer(
            config,
            replay=patient(peers["replay"], "replay", BatchSource, limit_s=config.replay.take_timeout_s + 60),
            learner=RankGroup(learners),
            publisher=self.publisher,
            validator=build.build_validator(config, prompts, self.waits),
            checkpoints=build.build_checkpoints(config, self.folder.checkpoints, prompts, resume),
            total_steps=build.total_steps(config, await prompts.num_prompts()),
            record=self._records.append,
            waits=self.waits,
            metrics=self.metrics,
            keep=self._keep,
        )

    def _keep(self, standing: Standing) -> None:
        standing.first_record, standing.records = self._records.newest()
        write_standing(self.folder.standing, standing)

    def _replica_failed(self, name: str, error: BaseException) -> None:
        log.error("replica %s is out of rotation: %s", name, error)
        if isinstance(error, WaitTimeout):
            self.metrics.inc("streamrl_weight_sync_failures_total", reason="timeout")
        self._failed[name] = to_wire(error)

    async def attach(self, name: str, handle: ActorHandle) -> Any:
        """A replica joins: it serves only after it holds the newest version."""
        return await self._guarded(self._attach(name, handle))

    async def _attach(self, name: str, handle: ActorHandle) -> None:
        longest_s = max(self.config.rollout.timeouts.session_s, self.config.weights.publish_timeout_s)  # deadlines of validator and publisher
        replica = client(handle, name, Replica, limit_s=longest_s + 30, folder=self.folder)
        replica.name = name
        await self.publisher.join(replica)

    async def detach(self, name: str) -> None:
        """A replica is gone."""
        self.publisher.remove(name)
        self._failed.pop(name, None)

    async def prepare(self) -> Any:
        """Restore and publish the starting weights; before any loop runs."""
        with self.metrics.state("start"):
            return await self._guarded(self.trainer.prepare())

    async def recall(self) -> Any:
        """Go on where another trainer's process stood; before the replicas join."""
        with self.metrics.state("start"):
            return await self._guarded(self._recall())

    async def _recall(self) -> None:
        await self.trainer.recall(self._predecessor())

    async def fall_back(self) -> Any:
        """Go on from the newest checkpoint with new learner ranks; before the replicas join."""
        with self.metrics.state("start"):
            return await self._guarded(self._fall_back())

    async def _fall_back(self) -> None:
        await self.trainer.fall_back(self._predecessor())

    def _predecessor(self) -> Standing:
        """Records are numbered over all trainers of a run."""
        standing = read_standing(self.folder.standing)
        self._records.load(standing.first_record, standing.records)
        return standing

    async def work(self) -> None:
        await self.trainer.run()

    async def progress(self, since: int) -> bytes:
        """Records from number ``since`` on, and the totals."""
        trainer = self.trainer
        return msgspec.msgpack.encode(Progress(self._records.since(since), trainer.totals, self._failed, trainer.state.published, trainer.total_steps))

    async def facts(self) -> Facts:
        trainer: Trainer | None = getattr(self, "trainer", None)  # None while it opens
        return Facts() if trainer is None else Facts(trainer=trainer_facts(trainer))

    async def close(self) -> None:
        self.trainer.stop()

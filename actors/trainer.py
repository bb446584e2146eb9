"""Trainer actor: dispatches the steps of the run over keys and tags. It never imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from ray.actor import ActorHandle

from actors.host import Host
from actors.remote import client
from streamrl.pipeline import build
from streamrl.pipeline.learner_group import RankGroup
from streamrl.pipeline.records import StepRecord, Totals
from streamrl.pipeline.trainer import Trainer
from streamrl.pipeline.validation import Validator
from streamrl.protocol.interfaces import BatchSource, Learner, PromptSource, Replica
from streamrl.weights.publisher import WeightPublisher


class Progress(msgspec.Struct, frozen=True):
    """What the driver shows: records it has not seen yet, the totals so far, and replicas that failed a publication."""

    records: list[StepRecord]
    totals: Totals
    failed_replicas: list[tuple[str, str]]
    weight_version: int


class TrainerActor(Host):
    """Runs ``Trainer.run``; replicas join and leave while it runs."""

    async def open(self, peers: dict[str, Any]) -> None:
        config = self.config
        prompts = client(peers["prompt"], "prompt", PromptSource, limit_s=60)
        learners = [client(handle, name, Learner, limit_s=config.learner.step_timeout_s + 30) for name, handle in peers.items() if name.startswith("learner-")]
        self._records: list[StepRecord] = []
        self._failed: list[tuple[str, str]] = []
        self.publisher = WeightPublisher(config.weights, on_failure=lambda name, error: self._failed.append((name, str(error))))
        resume = Path(self.settings.resume) if self.settings.resume else None
        self.trainer = Trainer(
            config,
            replay=client(peers["replay"], "replay", BatchSource, limit_s=config.replay.take_timeout_s + 60),
            learner=RankGroup(learners),
            publisher=self.publisher,
            validator=Validator(prompts, self.waits, limit_s=config.rollout.timeouts.session_s),
            checkpoints=build.build_checkpoints(config, self.folder.checkpoints, prompts, resume),
            total_steps=build.total_steps(config, await prompts.num_prompts()),
            record=self._records.append,
            waits=self.waits,
            metrics=self.metrics,
        )

    async def attach(self, name: str, handle: ActorHandle) -> Any:
        """A replica joins: it serves only after it holds the newest version."""
        return await self._guarded(self._attach(name, handle))

    async def _attach(self, name: str, handle: ActorHandle) -> None:
        replica = client(handle, name, Replica, limit_s=self.config.rollout.timeouts.session_s)
        replica.name = name
        await self.publisher.join(replica)

    async def detach(self, name: str) -> None:
        """A replica is gone."""
        self.publisher.remove(name)

    async def prepare(self) -> Any:
        """Restore and publish the starting weights; before any loop runs."""
        return await self._guarded(self.trainer.prepare())

    async def work(self) -> None:
        await self.trainer.run()

    async def progress(self, since: int) -> bytes:
        """Records from number ``since`` on, and the totals."""
        failed, self._failed = self._failed, []
        return msgspec.msgpack.encode(Progress(self._records[since:], self.trainer.totals, failed, self.trainer.state.published))

    async def close(self) -> None:
        self.trainer.stop()

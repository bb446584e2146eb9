"""The whole pipeline in one process, without Ray: the reference semantics of the actors, and what most tests run.

Hosts the same loops over the same builders as ``actors/``; the only differences are that a call is a method call and that nothing
is restarted. Ends when the trainer ends; every other loop is then closed by the replay buffer or cancelled.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from streamrl.config import Config
from streamrl.dataplane import Store
from streamrl.pipeline import build
from streamrl.pipeline.learner_group import RankGroup, Threaded
from streamrl.pipeline.loops import LeaseGate, cancel_all, feed_prompts, generate_groups, keep_leases
from streamrl.pipeline.records import StepRecord, Totals
from streamrl.pipeline.replica import EngineReplica
from streamrl.pipeline.trainer import Trainer
from streamrl.pipeline.waits import WaitTable
from streamrl.protocol.clock import SystemClock
from streamrl.protocol.interfaces import Engine
from streamrl.telemetry.metrics import Metrics
from streamrl.telemetry.run_folder import RunFolder
from streamrl.weights.publisher import WeightPublisher

EngineFactory = Callable[[Config, str], Engine]


class LocalPipeline:
    """All parts of a run in this process. ``learner_rank`` and ``replay`` stay readable between ``run`` and ``close`` for those who compare."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        make_engine: EngineFactory = build.build_engine,
        record: Callable[[StepRecord], None] = lambda record: None,
        resume: Path | None = None,
    ) -> None:
        self.config = config
        self._loop = asyncio.get_running_loop()
        folder = RunFolder(run_dir)
        self.index = build.build_index(config, folder.run_id, os.getpid(), folder.ledger)
        self.store = Store(self.index, writer="local", folder=self.index.path, config=config.dataplane, loop=self._loop)
        self.replay = build.build_replay(config, self.store, folder.ledger)
        self.prompts = build.build_prompts(config)
        self.learner_rank = build.build_rank(config, self.store, run_dir / "weights", folder.samples, 0)
        self._threaded = Threaded(self.learner_rank)
        self.waits = WaitTable("local")
        self.metrics = Metrics("driver", "local")
        self._engines = [make_engine(config, f"rollout-{i}") for i in range(config.rollout.num_actors)]
        self._runners = [build.build_runner(config, engine, self.metrics) for engine in self._engines]
        self._gates = [LeaseGate() for _ in self._engines]
        self._publisher = WeightPublisher(config.weights)
        self._checkpoints = build.build_checkpoints(config, run_dir / "checkpoints", self.prompts, resume)
        self._record = record

    async def run(self) -> Totals:
        """Start the parts and run the loops until the trainer ends. ``close`` afterwards."""
        return await self._run_loops(await self._start())

    async def close(self) -> None:
        """Close every part in order."""
        await self.replay.close()
        await asyncio.gather(*(runner.close() for runner in self._runners))
        await asyncio.gather(*(engine.stop() for engine in self._engines))
        await asyncio.to_thread(self.learner_rank.stop)
        self._threaded.close()
        await self.store.aclose()
        self.index.close()

    async def _start(self) -> Trainer:
        await asyncio.gather(*(engine.start() for engine in self._engines), *(runner.start() for runner in self._runners))
        await asyncio.to_thread(lambda: self.learner_rank.start(self.learner_rank.open_rendezvous("127.0.0.1")))
        for engine, runner, gate in zip(self._engines, self._runners, self._gates, strict=True):
            await self._publisher.join(EngineReplica(engine_name(engine, self._engines), engine, runner, gate))
        trainer = Trainer(
            self.config,
            replay=self.replay,
            learner=RankGroup([self._threaded]),  # type: ignore[list-item]  # its methods are those of the rank, made async
            publisher=self._publisher,
            validator=build.build_validator(self.config, self.prompts, self.waits),
            checkpoints=self._checkpoints,
            total_steps=build.total_steps(self.config, await self.prompts.num_prompts()),
            record=self._record,
            waits=self.waits,
            metrics=self.metrics,
        )
        await trainer.prepare()
        return trainer

    async def _run_loops(self, trainer: Trainer) -> Totals:
        """The first loop that ends badly ends the run with its error; the trainer's end ends it well."""
        training = asyncio.create_task(trainer.run(), name="trainer")
        others = [asyncio.create_task(self.replay.run_timers(), name="timers"), asyncio.create_task(self._feed(), name="feed")]
        for engine, runner, gate in zip(self._engines, self._runners, self._gates, strict=True):
            worker = build.build_worker(
                self.config,
                engine_name(engine, self._engines),
                replay=self.replay,
                store=self.store,
                runner=runner,
                engine=engine,
                waits=self.waits,
                metrics=self.metrics,
                gate=gate,
            )
            others.append(asyncio.create_task(generate_groups(worker, n=self.config.rollout.n), name=worker.name))
            others.append(asyncio.create_task(keep_leases(worker, self.config.replay, SystemClock()), name=f"{worker.name} leases"))
        try:
            open_loops = set(others)
            while not training.done():
                done, _ = await asyncio.wait({training, *open_loops}, return_when=asyncio.FIRST_COMPLETED)
                for task in done & open_loops:
                    open_loops.discard(task)
                    task.result()
            return training.result()
        finally:
            await cancel_all([*others, training])

    async def _feed(self) -> None:
        await feed_prompts(self.prompts, self.replay, chunk=self.config.data.train_batch_size, waits=self.waits, metrics=self.metrics)


def engine_name(engine: Engine, engines: list[Engine]) -> str:
    """rollout-0, rollout-1, ..."""
    return f"rollout-{engines.index(engine)}"


async def run_local(config: Config, run_dir: Path, **options: object) -> Totals:
    """Run ``config`` (resolved) in this process; checkpoints go below ``run_dir``."""
    pipeline = LocalPipeline(config, run_dir, **options)  # type: ignore[arg-type]
    try:
        return await pipeline.run()
    finally:
        await pipeline.close()

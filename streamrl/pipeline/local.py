"""The whole pipeline in one process, without Ray: the reference semantics of the actors, and what most tests run.

Hosts the same loops over the same builders as ``actors/``; the only differences are that a call is a method call and that nothing
is restarted. Ends when the trainer ends; every other loop is then closed by the replay buffer or cancelled.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from streamrl.config import Config
from streamrl.dataplane import Store
from streamrl.pipeline import build
from streamrl.pipeline.learner_group import RankGroup, Threaded
from streamrl.pipeline.loops import GroupWorker, cancel_all, feed_prompts, generate_groups, keep_leases, tell_the_rest
from streamrl.pipeline.metering import ReplayMeter, StoreMeter, export_every
from streamrl.pipeline.records import StepRecord, Totals
from streamrl.pipeline.replica import EngineReplica
from streamrl.pipeline.trainer import Trainer
from streamrl.protocol.clock import SystemClock
from streamrl.protocol.interfaces import Engine
from streamrl.protocol.waits import WaitTable
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
        make_metrics: Callable[[str, str], Metrics] = Metrics,
    ) -> None:
        self.config = config
        self._loop = asyncio.get_running_loop()
        folder = RunFolder(run_dir)
        self.index = build.build_index(config, folder.run_id, os.getpid(), folder.ledger)
        names = [f"rollout-{i}" for i in range(config.rollout.num_actors)]
        kept = ["driver", "prompt", "replay", "store", "trainer", "learner-0", *names]
        self.pages = {name: make_metrics(name.partition("-")[0], name) for name in kept}  # one an actor, as in a run of several processes
        self.waits = WaitTable("local")
        self.store, self._learner_store = self._client("local", names[0]), self._client("learner-0", "learner-0")
        self.replay = build.build_replay(config, self.store, folder.ledger)
        self.prompts = build.build_prompts(config)
        self.learner_rank = build.build_rank(config, self._learner_store, run_dir / "weights", folder.samples, 0, self.pages["learner-0"])
        self._threaded = Threaded(self.learner_rank)
        self._engines = [make_engine(config, name) for name in names]
        self._workers = [self._worker(name, engine) for name, engine in zip(names, self._engines, strict=True)]
        self._publisher = WeightPublisher(config.weights)
        self._checkpoints = build.build_checkpoints(config, run_dir / "checkpoints", self.prompts, resume)
        self._record = record
        self._totals = Totals()
        self._replay_meter = ReplayMeter(self.pages["replay"], config.replay.max_staleness)
        self._store_meter = StoreMeter(self.pages["store"])

    def _client(self, writer: str, actor: str) -> Store:
        return Store(self.index, writer=writer, folder=self.index.path, config=self.config.dataplane, loop=self._loop, metrics=self.pages[actor])

    def _worker(self, name: str, engine: Engine) -> GroupWorker:
        return build.build_worker(
            self.config,
            name,
            replay=self.replay,
            store=self.store,
            runner=build.build_runner(self.config, engine, self.pages[name]),
            engine=engine,
            waits=self.waits,
            metrics=self.pages[name],
        )

    async def run(self) -> Totals:
        """Start the parts and run the loops until the trainer ends. ``close`` afterwards."""
        with ExitStack() as starting:
            for metrics in self.pages.values():
                starting.enter_context(metrics.state("start"))
            trainer = await self._start()
        return await self._run_loops(trainer)

    async def close(self) -> None:
        """Close every part in order. Only then the totals that ``run`` returned have the ledger's last word."""
        await self.replay.close()
        await asyncio.gather(*(worker.runner.close() for worker in self._workers))
        await asyncio.gather(*(engine.stop() for engine in self._engines))
        await asyncio.gather(*(tell_the_rest(worker) for worker in self._workers))
        self._totals.close(await self.replay.stats())
        await asyncio.to_thread(self.learner_rank.stop)
        self._threaded.close()
        await self.export()
        await asyncio.gather(self.store.aclose(), self._learner_store.aclose())
        self.index.close()

    async def _start(self) -> Trainer:
        await asyncio.gather(*(engine.start() for engine in self._engines), *(worker.runner.start() for worker in self._workers))
        await asyncio.to_thread(lambda: self.learner_rank.start(self.learner_rank.open_rendezvous("127.0.0.1")))
        for worker, engine in zip(self._workers, self._engines, strict=True):
            replica = EngineReplica(worker.name, engine, worker.runner, worker.gate, waits=self.waits, metrics=worker.metrics, spent=worker.spent)
            await self._publisher.join(replica)
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
            metrics=self.pages["trainer"],
        )
        await trainer.prepare()
        return trainer

    async def _run_loops(self, trainer: Trainer) -> Totals:
        """The first loop that ends badly ends the run with its error; the trainer's end ends it well."""
        training = asyncio.create_task(trainer.run(), name="trainer")
        others = [asyncio.create_task(self.replay.run_timers(), name="timers"), asyncio.create_task(self._feed(), name="feed")]
        others.append(asyncio.create_task(export_every(self.export, SystemClock()), name="export"))
        for worker in self._workers:
            others.append(asyncio.create_task(generate_groups(worker, n=self.config.rollout.n), name=worker.name))
            others.append(asyncio.create_task(keep_leases(worker, self.config.replay, SystemClock()), name=f"{worker.name} leases"))
        try:
            open_loops = set(others)
            with self.pages["learner-0"].state("wait_data"):  # whenever no call runs
                self._totals = await self._until_trained(training, open_loops)
        finally:
            await cancel_all([*others, training])
        return self._totals

    @staticmethod
    async def _until_trained(training: asyncio.Task[Totals], open_loops: set[asyncio.Task[None]]) -> Totals:
        while not training.done():
            done, _ = await asyncio.wait({training, *open_loops}, return_when=asyncio.FIRST_COMPLETED)
            for task in done & open_loops:
                open_loops.discard(task)
                task.result()
        return training.result()

    async def export(self) -> None:
        """The counts of replay buffer and store to their pages."""
        self._replay_meter.export(await self.replay.stats())
        self._store_meter.export(await self.index.use())

    async def _feed(self) -> None:
        await feed_prompts(self.prompts, self.replay, chunk=self.config.data.train_batch_size, waits=self.waits, metrics=self.pages["prompt"])


async def run_local(config: Config, run_dir: Path, **options: object) -> Totals:
    """Run ``config`` (resolved) in this process; checkpoints go below ``run_dir``."""
    pipeline = LocalPipeline(config, run_dir, **options)  # type: ignore[arg-type]
    try:
        return await pipeline.run()
    finally:
        await pipeline.close()

"""The real loops of a whole run in one process, and each part's health as its actor would tell it: stalls are put into the parts, and diagnosed from outside.

prompts ► replay buffer ► rollout actors (real loops, a scripted engine, tools and scorers of the test) ► trainer ► learner ranks (scripted, in threads)
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from streamrl.config.rollout import ReplayConfig
from streamrl.diagnosis import Diagnosis, RunView, diagnose
from streamrl.diagnosis.answers import Answers, Table
from streamrl.pipeline.checkpoints import Checkpoints
from streamrl.pipeline.health import EngineWatch, Facts, health_of, rollout_facts, trainer_facts
from streamrl.pipeline.learner_group import RankGroup, Threaded
from streamrl.pipeline.loops import GroupWorker, LeaseGate, cancel_all, feed_prompts, generate_groups, keep_leases
from streamrl.pipeline.replica import EngineReplica
from streamrl.pipeline.trainer import Trainer
from streamrl.pipeline.validation import Validator
from streamrl.protocol.clock import SystemClock
from streamrl.protocol.generate import GenerateRequest, GenerateResult, SamplingParams
from streamrl.protocol.groups import GroupLease
from streamrl.protocol.health import Health
from streamrl.protocol.interfaces import LeaseSource
from streamrl.protocol.learn import StageReport, StepUpdates, UpdateReport, UpdateWork
from streamrl.protocol.meta import KVBatchMeta
from streamrl.protocol.trajectory import Prompt, Trajectory
from streamrl.protocol.waits import WaitTable, shown
from streamrl.protocol.weights import WeightManifest, WeightReport
from streamrl.replay import ReplayBuffer, ReplayService
from streamrl.rollout.generation import ResumingGenerate
from streamrl.telemetry.metrics import Metrics
from streamrl.telemetry.summary import RunStatus
from streamrl.testing import FaultyChannel, make_trajectory
from streamrl.weights.publisher import WeightPublisher
from tests.pipeline.tiny import tiny_config

B, N = 2, 2
STALL_S = 0.4  # telemetry.stall_s, scaled down
LIMIT_S = 4.0  # for a stall to be named


class Prompts:
    """Names prompts by their place; ``dry_after``: so many, then none comes any more."""

    def __init__(self, dry_after: int | None = None) -> None:
        self.position, self._dry_after = 0, dry_after

    async def next_prompts(self, count: int) -> list[Prompt]:
        first, self.position = self.position, self.position + count
        if self._dry_after is not None and self.position > self._dry_after:
            await asyncio.Event().wait()
        return [Prompt(f"p{i}", {"data_source": "toy"}, 0, i) for i in range(first, self.position)]

    async def validation_rows(self) -> list[dict[str, Any]]:
        return []

    async def state(self) -> dict[str, Any]:
        return {"epoch": 0, "position": self.position}


class Store:
    """Takes all rows; ``put`` may be a real store's."""

    def __init__(self, put: Callable[..., Any] | None = None) -> None:
        self._put = put

    async def put_trajectories(self, rows: list[Trajectory], tags: list[dict[str, Any]]) -> None:
        if self._put is not None:
            await self._put(rows, tags)


class Engine:
    """As far as the loops see one. ``hang_from``: from this call on none is answered; ``load``: awaited at a weight update."""

    def __init__(self, hang_from: int | None = None, load: asyncio.Event | None = None) -> None:
        self.version, self.calls, self.under_way = 0, 0, 0
        self._hang_from, self._load = hang_from, load

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.calls += 1
        self.under_way += 1
        try:
            if self._hang_from is not None and self.calls >= self._hang_from:
                await asyncio.Event().wait()
            await asyncio.sleep(0.002)
            return GenerateResult([6, 2], [-0.1, -0.1], [self.version] * 2, "eos")
        finally:
            self.under_way -= 1

    def tokens_under_way(self) -> int | None:
        return 7 if self.under_way else None

    def check(self) -> None:
        """A script does not break."""

    async def update_weights(self, manifest: WeightManifest) -> WeightReport:
        if self._load is not None and manifest.version > 1:
            await self._load.wait()
        self.version = manifest.version
        return WeightReport("engine", manifest.version, 0, 0.0, 0.0, 0.0)


class Runner:
    """Asks the engine, then ``then(lease, session_id)``: a tool, a scorer, whatever the test hangs."""

    def __init__(self, engine: Engine, then: Callable[[GroupLease, int], Any] | None = None) -> None:
        self._generate, self._then = ResumingGenerate(engine.generate, timeout_s=600.0), then

    async def run(self, lease: GroupLease, session_id: int, retry: int) -> list[Trajectory]:
        with shown("its end", "agent loop single_turn_agent", 3600.0):
            answer = await self._generate(GenerateRequest(f"{lease.uid}-{session_id}", [5], SamplingParams(max_tokens=8)))
            if self._then is not None:
                await self._then(lease, session_id)
        return [make_trajectory(lease.uid, session_id, version=answer.versions[0])]

    def check(self) -> None:
        """Nothing here breaks."""

    async def evaluate(self, questions: list[Any]) -> list[Any]:
        return []


class Rank:
    """One scripted learner rank; ``update`` meets the others at ``meeting``, the collective. ``hang_at``: the step in which it never comes."""

    def __init__(self, number: int, meeting: threading.Barrier, step_s: float = 0.005, hang_at: int | None = None) -> None:
        self.number, self.rank, self._meeting, self._step_s, self._hang_at = number, number, meeting, step_s, hang_at
        self.released = threading.Event()

    def log_probs(self, share: KVBatchMeta) -> StageReport:
        return StageReport()

    def advantages(self, batch: KVBatchMeta) -> StageReport:
        return StageReport({"critic/score/mean": 0.5}, [])

    def update(self, work: UpdateWork) -> UpdateReport:
        if self._hang_at is not None and work.global_step >= self._hang_at:
            self.released.wait()
        time.sleep(self._step_s)
        with shown("a reduction", "the other ranks", 60.0):
            self._meeting.wait()
        return UpdateReport(1, 0, trained_tokens=10)

    def last_updates(self) -> StepUpdates | None:
        return None

    def snapshot(self, version: int) -> WeightManifest | None:
        return WeightManifest(version, f"v{version}", [], 0) if self.number == 0 else None

    def stage(self) -> None:
        """Nothing to keep."""

    def save(self, folder: str) -> None:
        """Nothing to write."""

    def _unused(self, *_: Any) -> Any:
        raise AssertionError("this run has neither critic, reference nor reward model")

    rm_scores = ref_log_probs = values = update_critic = probe = load = _unused


class World:
    """One run. ``then``: of each session after its answer; ``worker_channel``: rollout-0 reaches the replay buffer through a ``FaultyChannel``."""

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        engine: Engine | None = None,
        then: Callable[[GroupLease, int], Any] | None = None,
        prompts: Prompts | None = None,
        store: Store | None = None,
        store_use: Callable[[], Any] | None = None,
        ranks: int = 1,
        slow_s: float = 0.005,
        hang_rank: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        worker_channel: bool = False,
        slots: int = 16,
        stall_s: float = STALL_S,
    ) -> None:
        self.config = tiny_config("trainer.val_before_train=false", *overrides, prompts=B, n=N, steps=100000)
        names = ["prompt", "replay", "store", "trainer", "rollout-0", *(f"learner-{i}" for i in range(ranks))]
        self.tables = {name: WaitTable(name) for name in names}
        self.deaf: set[str] = set()  # actors that do not answer
        self.silent: set[str] = set()
        self.skew_s: dict[str, float] = {}
        self.answers = Answers(stall_s)
        self.engine = engine or Engine()
        self.replay = ReplayService(ReplayBuffer(self.config.replay, groups_per_step=B, n=N, clock=clock))
        self.channel = FaultyChannel(LeaseSource, self.replay)
        self.prompts = prompts or Prompts()
        self._store_use = store_use
        meeting = threading.Barrier(ranks)
        self.ranks = [Rank(i, meeting, slow_s, 3 if hang_rank == i else None) for i in range(ranks)]
        self._meeting = meeting
        self.threaded = [Threaded(rank, self.tables[f"learner-{rank.number}"]) for rank in self.ranks]
        self.gate = LeaseGate()
        runner = Runner(self.engine, then)
        self.worker = GroupWorker(
            "rollout-0",
            replay=self.channel.peer if worker_channel else self.replay,
            store=store or Store(),
            runner=runner,
            slots=slots,
            session_retries=1,
            check_engine=lambda: None,
            waits=self.tables["rollout-0"],
            metrics=Metrics("rollout", "rollout-0"),
            gate=self.gate,
        )
        self._watch = EngineWatch(self.engine)
        self.publisher = WeightPublisher(self.config.weights)
        self.replica = EngineReplica("rollout-0", self.engine, runner, self.gate, waits=self.tables["rollout-0"])
        self.trainer = Trainer(
            self.config,
            replay=self.replay,
            learner=RankGroup(self.threaded),
            publisher=self.publisher,
            validator=Validator(self.prompts, self.tables["trainer"], limit_s=5.0),
            checkpoints=Checkpoints(folder, self.config.trainer, self.prompts, None),
            total_steps=100000,
            record=lambda record: None,
            waits=self.tables["trainer"],
            metrics=Metrics("trainer", "trainer"),
        )

    @asynccontextmanager
    async def running(self):
        await self.trainer.prepare()
        await self.publisher.join(self.replica)
        beat = ReplayConfig(heartbeat_s=0.05, lease_s=self.config.replay.lease_s)
        loops = [
            self.trainer.run(),
            self.replay.run_timers(),
            feed_prompts(self.prompts, self.replay, chunk=B, waits=self.tables["prompt"], metrics=Metrics("prompt", "prompt"), limit_s=30.0),
            generate_groups(self.worker, n=N),
            keep_leases(self.worker, beat, SystemClock()),
        ]
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            yield self
        finally:
            self._meeting.abort()
            for rank in self.ranks:
                rank.released.set()
            await cancel_all(tasks)
            for threaded in self.threaded:
                threaded.close()

    def health(self, name: str) -> Health:
        facts = Facts()
        if name == "replay":
            facts = Facts(replay=self.replay.facts())
        elif name == "rollout-0":
            facts = Facts(rollout=rollout_facts(self.worker, self.engine, self._watch))
        elif name == "trainer":
            facts = Facts(trainer=trainer_facts(self.trainer))
        elif name == "store" and self._store_use is not None:
            facts = Facts(store=self._store_use())
        found = health_of(self.tables[name], facts)
        return _skewed(found, self.skew_s.get(name, 0.0))

    def view(self) -> RunView:
        """As it would be read from the run folder."""
        asked = time.time()
        table = self.answers.take({name: None if name in self.deaf else self.health(name) for name in self.tables}, asked)
        now = time.time()
        status = RunStatus(state="running", pid=1, started=now - 10, updated=now)
        return RunView(now, msgspec.json.decode(msgspec.json.encode(table), type=Table), status, driver="running", folder="/runs/x")

    def look(self) -> Diagnosis:
        return diagnose(self.view())

    async def named(self, condition: Callable[[Diagnosis], Any]) -> Diagnosis:
        """The first diagnosis that meets ``condition``, asked as the driver asks."""
        found = None
        try:
            async with asyncio.timeout(LIMIT_S):
                while not condition(found := self.look()):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"the culprit must be named within {LIMIT_S} s, got {found}") from None
        return found

    async def trained(self, steps: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while self.trainer.totals.steps < steps:
                await asyncio.sleep(0.005)


def _skewed(health: Health, ahead_s: float) -> Health:
    """As a machine whose clock is ahead would tell it."""
    if not ahead_s:
        return health
    waits = [msgspec.structs.replace(wait, since=wait.since + ahead_s) for wait in health.waits]
    doing = [msgspec.structs.replace(one, since=one.since + ahead_s, on_since=one.on_since and one.on_since + ahead_s) for one in health.doing]
    calls = [msgspec.structs.replace(one, last_end=one.last_end and one.last_end + ahead_s) for one in health.calls]
    return msgspec.structs.replace(health, time=health.time + ahead_s, waits=waits, doing=doing, calls=calls)

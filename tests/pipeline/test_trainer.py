"""The trainer alone: a scripted learner and real replay buffers, checkpoints and publisher; no engine, no tensors."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import Config
from streamrl.errors import ActorDied, EngineError, RunFailed
from streamrl.learner import checkpoint_folder
from streamrl.pipeline.checkpoints import Checkpoints
from streamrl.pipeline.records import StepRecord
from streamrl.pipeline.trainer import Trainer
from streamrl.pipeline.validation import Validator
from streamrl.protocol.groups import SessionPush
from streamrl.protocol.keys import TrajectoryKey
from streamrl.protocol.learn import StageReport, StepUpdates, UpdateReport, UpdateWork
from streamrl.protocol.meta import KVBatchMeta
from streamrl.protocol.trajectory import Prompt
from streamrl.protocol.validation import ValQuestion, ValResult
from streamrl.protocol.waits import WaitTable
from streamrl.protocol.weights import WeightManifest, WeightReport
from streamrl.replay import ReplayBuffer, ReplayService
from streamrl.telemetry.metrics import Metrics
from streamrl.weights.publisher import WeightPublisher
from tests.pipeline.tiny import tiny_config

LIMIT_S = 5.0
B, N = 2, 2


class Learner:
    """Moves its weights in every update but those of the steps in ``skip``; names ``too_small`` groups as rejected."""

    ranks = 1

    def __init__(self, skip: set[int] = frozenset(), too_small: set[str] = frozenset()) -> None:
        self.skip = skip
        self.too_small = too_small
        self.trained: list[list[str]] = []  # keys of each update of the policy
        self.valued: list[list[str]] = []  # and of the critic
        self.snapshots: list[int] = []
        self.stages: list[str] = []
        self.last: StepUpdates | None = None
        self.moves = 0  # optimizer steps since it began with the weights ``began_with``
        self.began_with = f"start of {id(self)}"

    async def log_probs(self, shares: list[KVBatchMeta]) -> StageReport:
        self.stages.append("log_probs")
        return StageReport()

    async def ref_log_probs(self, shares: list[KVBatchMeta]) -> StageReport:
        self.stages.append("ref_log_probs")
        return StageReport()

    async def advantages(self, batch: KVBatchMeta) -> StageReport:
        rejected = [(key, "group_too_small") for key in batch.keys if TrajectoryKey.parse(key).uid in self.too_small]
        return StageReport({"critic/score/mean": 0.5}, rejected)

    async def values(self, shares: list[KVBatchMeta]) -> StageReport:
        self.stages.append("values")
        return StageReport()

    async def update_critic(self, works: list[UpdateWork]) -> UpdateReport:
        self.stages.append("update_critic")
        (work,) = works
        self.valued.append(work.meta.keys)
        self.last = StepUpdates(work.global_step, critic=UpdateReport(len(work.mini_batches), 0, trained_tokens=10 * len(work.meta)))
        return self.last.critic

    async def update(self, works: list[UpdateWork]) -> UpdateReport:
        self.stages.append("update")
        (work,) = works
        self.trained.append(work.meta.keys)
        applied = 0 if work.global_step in self.skip or not work.mini_batches else len(work.mini_batches)
        self.moves += applied
        report = UpdateReport(applied, len(work.mini_batches) - applied, trained_tokens=10 * len(work.meta))
        critic = self.last.critic if self.last is not None and self.last.global_step == work.global_step else None
        self.last = StepUpdates(work.global_step, critic, report)
        return report

    async def last_updates(self) -> StepUpdates | None:
        return self.last

    async def snapshot(self, version: int) -> WeightManifest:
        self.snapshots.append(version)
        return WeightManifest(version, f"{self.began_with} + {self.moves}", [], 0)

    async def save(self, folder: str) -> None:
        (Path(folder) / "weights").write_text(self.staged)

    async def stage(self) -> None:
        self.staged = str(self.moves)

    async def load(self, folder: str) -> None:
        assert (Path(folder) / "weights").read_text().isdigit()


class Replica:
    """Takes versions up when ``gate`` is open; fails with ``error`` when there is one."""

    name = "rollout-0"

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.versions: list[int] = []
        self.weights: dict[int, str] = {}  # by version; two sets of weights under one number are an error
        self.evaluations = 0
        self.hang = False
        self.breaks_once: Exception | None = None

    async def update_weights(self, manifest: WeightManifest) -> WeightReport:
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.versions.append(manifest.version)
        assert self.weights.setdefault(manifest.version, manifest.path) == manifest.path
        return WeightReport(self.name, manifest.version, 0, 0.0, 0.0, 0.0)

    async def evaluate(self, questions: list[ValQuestion], alone: bool = False) -> list[ValResult]:
        self.evaluations += 1
        if self.hang:
            await asyncio.Event().wait()
        if (error := self.breaks_once) is not None:
            self.breaks_once = None
            raise error
        version = self.versions[-1]
        return [ValResult(1.0, versions=(version, version)) for _ in questions]


class Prompts:
    """Names prompts by their place in an endless epoch."""

    def __init__(self) -> None:
        self.position = 0

    async def next_prompts(self, count: int) -> list[Prompt]:
        first, self.position = self.position, self.position + count
        return [Prompt(f"p{i}", {}, 0, i) for i in range(first, self.position)]

    async def validation_rows(self) -> list[dict[str, Any]]:
        return [{}, {}]

    async def state(self) -> dict[str, Any]:
        return {"epoch": 0, "position": self.position}

    async def restore(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class House:
    """A trainer and its surroundings; ``feed`` admits prompts, ``answer`` generates what is pending."""

    def __init__(self, folder: Path, *overrides: str, learner: Learner | None = None, resume: Path | None = None, steps: int = 3) -> None:
        self.config: Config = tiny_config("trainer.val_before_train=false", *overrides, prompts=B, n=N)
        self.replay = ReplayService(ReplayBuffer(self.config.replay, groups_per_step=B, n=N))
        self.learner = learner or Learner()
        self.replica = Replica()
        self.prompts = Prompts()
        self.publisher = WeightPublisher(self.config.weights)
        self.records: list[StepRecord] = []
        waits = WaitTable("trainer")
        self.trainer = Trainer(
            self.config,
            replay=self.replay,
            learner=self.learner,
            publisher=self.publisher,
            validator=Validator(self.prompts, waits, limit_s=LIMIT_S),
            checkpoints=Checkpoints(folder, self.config.trainer, self.prompts, resume),
            total_steps=steps,
            record=self.records.append,
            waits=waits,
            metrics=Metrics("trainer", "trainer"),
        )

    async def open(self) -> None:
        await self.trainer.prepare()
        await self.publisher.join(self.replica)

    async def feed(self, versions: int | None = None) -> None:
        """Fill all free slots and answer every pending group under version ``versions`` (None: the published one)."""
        slots = self.replay.buffer.admission(99).slots
        if slots:
            await self.replay.admit(await self.prompts.next_prompts(slots))
        await self.answer(versions)

    async def answer(self, version: int | None = None) -> None:
        reply = self.replay.buffer.lease("rollout-0", 99)
        at = self.replay.buffer.published_version if version is None else version
        tag = {"prompt_len": 3, "response_len": 5, "seq_len": 8, "min_global_steps": at, "max_global_steps": at}
        for lease in reply.leases:
            for session in range(lease.n):
                await self.replay.push(SessionPush(lease.uid, lease.attempt, session, [f"{lease.uid}_{session}_0"], [dict(tag)]))

    async def keep_fed(self) -> None:
        while not self.replay.buffer.closed:
            await self.feed()
            await asyncio.sleep(0.001)

    async def run(self) -> None:
        await self.open()
        feeding = asyncio.create_task(self.keep_fed())
        try:
            await self.trainer.run()
        finally:
            feeding.cancel()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


def uids(keys: list[str]) -> list[str]:
    return list(dict.fromkeys(TrajectoryKey.parse(key).uid for key in keys))


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("kl", [None, "algorithm.use_kl_in_reward=true", "actor.use_kl_loss=true"])
def test_the_reference_is_asked_between_scoring_and_update_when_a_kl_needs_it(tmp_path, kl):
    async def case():
        house = House(tmp_path, *([kl] if kl else []), steps=1)
        await house.run()
        assert house.learner.stages == ["log_probs", *(["ref_log_probs"] if kl else []), "update"]

    run(case())


def test_every_step_trains_new_groups_and_is_published_under_the_next_number(tmp_path):
    async def case():
        house = House(tmp_path)
        await house.run()
        assert [uids(keys) for keys in house.learner.trained] == [["p0", "p1"], ["p2", "p3"], ["p4", "p5"]]
        assert house.learner.snapshots == house.replica.versions == [0, 1, 2, 3]
        assert [r.version for r in house.records if r.val_accuracy is None] == [1, 2, 3]
        assert house.trainer.totals.val_accuracies == [1.0]

    run(case())


def test_a_stop_while_waiting_for_a_batch_saves_every_group_that_was_not_trained(tmp_path):
    async def case():
        house = House(tmp_path)
        await house.open()
        running = asyncio.create_task(house.trainer.run())
        await house.feed()
        await until(lambda: len(house.learner.trained) == 2)  # E = 1: four groups were admitted
        await house.replay.admit(await house.prompts.next_prompts(1))
        house.trainer.stop()
        await running
        assert house.trainer.totals.val_accuracies == []  # a stopped run is not validated

        resumed = House(tmp_path, resume=checkpoint_folder.latest(tmp_path))
        await resumed.open()
        assert list(resumed.replay.buffer.table.groups) == ["p4"]
        assert resumed.prompts.position == 5 and resumed.trainer.state.step == 2

    run(case())


def test_a_publication_that_fails_while_no_batch_comes_ends_the_run_at_once(tmp_path):
    async def case():
        house = House(tmp_path)
        await house.open()
        house.replica.gate.clear()
        running = asyncio.create_task(house.trainer.run())
        await house.replay.admit(await house.prompts.next_prompts(B))
        await house.answer()
        await until(lambda: len(house.learner.trained) == 1 and house.records)  # now it waits for a batch
        house.replica.error = EngineError("the engine core has ended")
        house.replica.gate.set()
        with pytest.raises(RunFailed, match="one healthy replica"):
            await running

    run(case())


def test_a_skipped_step_publishes_nothing_and_its_groups_are_dropped_with_their_reason(tmp_path):
    async def case():
        house = House(tmp_path, learner=Learner(skip={2}))
        await house.run()
        assert house.replica.versions == [0, 1, 2]
        assert house.replay.buffer.stats().dropped["skipped_step"] == B
        assert house.trainer.totals.stats.trained == 2 * B and house.trainer.totals.lag_mean <= 1

    run(case())


def test_groups_that_grew_too_old_leave_the_batch_and_a_rejection_of_one_of_them_is_no_error(tmp_path):
    async def case():
        house = House(tmp_path, "replay.max_off_policy_strategy=drop", learner=Learner(too_small={"p2"}), steps=2)
        await house.open()
        await house.replay.published(4)
        house.trainer.state.published = house.trainer.state.version = 4
        await house.replay.admit(await house.prompts.next_prompts(2 * B))
        leases = {lease.uid: lease for lease in house.replay.buffer.lease("rollout-0", 9).leases}
        for uid, version in [("p0", 4), ("p1", 4), ("p2", 3), ("p3", 4)]:
            tag = {"prompt_len": 3, "response_len": 5, "seq_len": 8, "min_global_steps": version, "max_global_steps": version}
            for session in range(N):
                await house.replay.push(SessionPush(uid, leases[uid].attempt, session, [f"{uid}_{session}_0"], [tag]))
        house.replica.gate.clear()  # version 5 is published only after the second batch was taken: p2 then has lag 2
        running = asyncio.create_task(house.trainer.run())
        await until(lambda: house.learner.stages.count("log_probs") == 2)
        house.replica.gate.set()
        await running
        assert [uids(keys) for keys in house.learner.trained] == [["p0", "p1"], ["p3"]]
        assert [r.lags for r in house.records if r.val_accuracy is None] == [[0, 0], [1]]
        assert house.replay.buffer.stats().dropped == {"stale": 1} and house.trainer.totals.stats.lag_max == 1

    run(case())


def test_tokens_of_a_version_that_is_not_published_yet_have_lag_zero_when_it_is(tmp_path):
    async def case():
        house = House(tmp_path, steps=2)
        await house.open()
        await house.replay.admit(await house.prompts.next_prompts(2 * B))
        leases = house.replay.buffer.lease("rollout-0", 9).leases
        house.replica.gate.clear()
        running = asyncio.create_task(house.trainer.run())
        for lease, version in zip(leases, [0, 0, 1, 1], strict=True):  # one replica already serves 1
            tag = {"prompt_len": 3, "response_len": 5, "seq_len": 8, "min_global_steps": version, "max_global_steps": version}
            for session in range(N):
                await house.replay.push(SessionPush(lease.uid, 1, session, [f"{lease.uid}_{session}_0"], [tag]))
        await until(lambda: house.learner.stages.count("log_probs") == 2)
        house.replica.gate.set()
        await running
        assert [r.lags for r in house.records if r.val_accuracy is None] == [[0, 0], [0, 0]]

    run(case())


def test_no_optimizer_step_starts_before_the_previous_version_is_published(tmp_path):
    async def case():
        house = House(tmp_path, steps=2)
        await house.open()
        house.replica.gate.clear()
        running = asyncio.create_task(house.trainer.run())
        await house.feed()
        await until(lambda: house.learner.stages.count("log_probs") == 2)
        await asyncio.sleep(0.02)
        assert house.learner.stages.count("update") == 1
        house.replica.gate.set()
        await running
        assert house.learner.stages.count("update") == 2

    run(case())


def test_a_resumed_run_never_reuses_a_version_number_and_trains_no_prompt_twice(tmp_path):
    async def case():
        crashed = House(tmp_path, "trainer.save_freq=2", steps=9)
        await crashed.open()
        feeding = asyncio.create_task(crashed.keep_fed())
        running = asyncio.create_task(crashed.trainer.run())
        await until(lambda: len(crashed.replica.versions) >= 4 and checkpoint_folder.latest(tmp_path))  # of step 2; version 3 was published since
        running.cancel()
        feeding.cancel()
        await asyncio.gather(running, feeding, return_exceptions=True)
        highest = max(crashed.learner.snapshots)
        saved = checkpoint_folder.latest(tmp_path)
        step = checkpoint_folder.step_of(saved)
        assert step < highest

        resumed = House(tmp_path, resume=saved, steps=step + 3)
        await resumed.run()
        assert resumed.learner.snapshots[0] == highest + 1
        kept = [uid for keys in [*crashed.learner.trained[:step], *resumed.learner.trained] for uid in uids(keys)]
        assert kept == [f"p{i}" for i in range((step + 3) * B)]

    run(case())


def test_the_rates_of_a_resumed_run_begin_where_its_replay_buffer_stands(tmp_path):
    async def case():
        await House(tmp_path, steps=2).run()
        resumed = House(tmp_path, resume=checkpoint_folder.latest(tmp_path))
        await resumed.open()
        totals, stats = resumed.trainer.totals, resumed.replay.buffer.stats()
        assert totals.steps == 2 and totals.earlier_trajectories == stats.trajectories_generated > 0
        assert totals.earlier_tokens == totals.last_generated == stats.tokens_generated > 0

    run(case())


def test_a_run_that_crashed_before_its_first_checkpoint_also_goes_on_above_its_numbers(tmp_path):
    async def case():
        crashed = House(tmp_path)
        await crashed.open()
        again = House(tmp_path)
        await again.open()
        assert again.learner.snapshots == [1]

    run(case())


def test_a_failing_last_validation_does_not_cost_the_checkpoint(tmp_path):
    async def case():
        house = House(tmp_path, steps=1)
        house.replica.breaks_once = ValueError("a row nobody can score")
        with pytest.raises(ValueError):
            await house.run()
        assert checkpoint_folder.step_of(checkpoint_folder.latest(tmp_path)) == 1

    run(case())


def test_a_stop_ends_a_validation_under_way_and_saves(tmp_path):
    async def case():
        house = House(tmp_path, "trainer.val_before_train=true")
        await house.open()
        house.replica.hang = True
        running = asyncio.create_task(house.trainer.run())
        await until(lambda: house.replica.evaluations)
        house.trainer.stop()
        await running
        assert checkpoint_folder.step_of(checkpoint_folder.latest(tmp_path)) == 0

    run(case())


@pytest.mark.parametrize("error", [ActorDied("rollout-0 has died"), EngineError("its engine core has ended")])
def test_validation_starts_again_when_a_replica_dies_or_its_engine_breaks(tmp_path, monkeypatch, error):
    async def case():
        monkeypatch.setattr("streamrl.pipeline.validation.RETRY_S", 0.001)
        house = House(tmp_path, steps=1)
        house.replica.breaks_once = error
        await house.run()
        assert house.trainer.totals.val_accuracies == [1.0] and house.replica.evaluations == 2

    run(case())


class LateReplay:
    """The buffer behind a connection: a batch is leased there, and its answer is still on the way."""

    def __init__(self, inner: ReplayService) -> None:
        self.inner, self.leased = inner, asyncio.Event()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    async def take(self, num_groups, wait_s):
        await self.inner.take(num_groups, wait_s)
        self.leased.set()
        await asyncio.sleep(LIMIT_S)


def test_a_batch_that_is_leased_while_the_stop_comes_is_in_nobodys_hands_afterwards(tmp_path):
    async def case():
        house = House(tmp_path)
        await house.open()
        house.trainer.replay = late = LateReplay(house.replay)
        feeding, running = asyncio.create_task(house.keep_fed()), asyncio.create_task(house.trainer.run())
        await late.leased.wait()
        house.trainer.stop()
        await running
        feeding.cancel()
        stats = house.replay.buffer.stats()
        assert (stats.leased, stats.ready, stats.trained) == (0, 0, 0) and stats.dropped["shutdown"] >= B

    run(case())

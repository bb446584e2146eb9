"""Validations and checkpoints go on beside training: neither stops generation, both belong to one version, and what goes wrong with them is heard."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest

from streamrl.errors import CheckpointError
from streamrl.learner import checkpoint_folder
from streamrl.pipeline.checkpoints import TrainerState
from streamrl.protocol.groups import ReplaySnapshot
from streamrl.protocol.validation import ValResult
from streamrl.telemetry.live import format_line
from tests.pipeline.test_trainer import B, House, Learner, Replica, run, until

STEPS = 8


class Judge(Replica):
    """Its answers wait until ``may_answer``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.may_answer = asyncio.Event()
        self.alone: list[bool] = []

    async def evaluate(self, questions, alone=False):
        self.alone.append(alone)
        version = self.versions[-1]
        await self.may_answer.wait()
        return [ValResult(1.0, versions=(version, version)) for _ in questions]


class SlowWriter(Learner):
    """Writes when ``may_write``, the content that was staged; the first ``failures`` writes fail."""

    def __init__(self, failures: int = 0) -> None:
        super().__init__()
        self.failures = failures
        self.may_write = asyncio.Event()
        self.writes = 0

    async def save(self, folder: str) -> None:
        (Path(folder) / "half").write_text("x")
        await self.may_write.wait()
        self.writes += 1
        if self.writes <= self.failures:
            raise CheckpointError("OSError: [Errno 28] No space left on device (rank 0)")
        await super().save(folder)


async def start(house: House, *judges: Judge) -> tuple[asyncio.Task, asyncio.Task]:
    await house.trainer.prepare()
    for replica in judges or (house.replica,):
        await house.publisher.join(replica)
    return asyncio.create_task(house.trainer.run()), asyncio.create_task(house.keep_fed())


async def end(house: House, running: asyncio.Task, feeding: asyncio.Task) -> None:
    try:
        await running
    finally:
        feeding.cancel()


def validations(house: House) -> list[tuple[int, int]]:
    return [(record.step, record.version) for record in house.records if record.val_accuracy is not None]


def test_training_goes_on_while_one_of_two_replicas_validates_and_the_measured_version_is_that_of_its_step(tmp_path):
    async def case():
        house = House(tmp_path, "trainer.test_freq=2", steps=STEPS)
        first, second = Judge("rollout-0"), Judge("rollout-1")
        first.may_answer.clear()
        second.may_answer.set()
        tasks = await start(house, first, second)
        await until(lambda: len(house.learner.trained) == 4)  # the one of step 4 waits for that of step 2
        await until(lambda: second.versions[-1] == 4)
        assert first.alone == [True] and first.versions[-1] == 2 and not validations(house)
        first.may_answer.set()
        await end(house, *tasks)
        assert validations(house) == [(2, 2), (4, 4), (6, 6), (8, 8)]
        assert first.versions[-1] == second.versions[-1] == STEPS and house.replay.buffer.stats().lag_max <= 1
        assert first.alone[-1] is second.alone[-1] is False  # at the end both are asked, and nothing is published

    run(case())


def test_with_one_replica_training_goes_on_for_one_step_and_the_next_version_waits(tmp_path):
    async def case():
        house = House(tmp_path, "trainer.test_freq=2", steps=STEPS)
        judge = Judge("rollout-0")
        tasks = await start(house, judge)
        await until(lambda: judge.alone and len(house.learner.trained) == 3)
        await asyncio.sleep(0.05)
        assert len(house.learner.trained) == 3 and judge.versions[-1] == 2 and judge.alone == [False]
        stats = house.replay.buffer.stats()
        assert stats.leased == stats.trained_unpublished == B  # generation goes on up to the bound, and the next batch is judged already
        judge.may_answer.set()
        await end(house, *tasks)
        assert validations(house)[:2] == [(2, 2), (4, 4)] and house.replay.buffer.stats().lag_max <= 1

    run(case())


def test_a_stop_ends_a_validation_beside_training(tmp_path):
    async def case():
        house = House(tmp_path, "trainer.test_freq=1", steps=STEPS)
        judge = Judge("rollout-0")
        tasks = await start(house, judge)
        await until(lambda: judge.alone)
        house.trainer.stop()
        await end(house, *tasks)
        assert not validations(house) and checkpoint_folder.latest(tmp_path) is not None

    run(case())


def test_a_validation_that_fails_ends_the_run_also_while_it_waits_for_a_batch(tmp_path):
    async def case():
        house = House(tmp_path, "trainer.test_freq=1", steps=STEPS)
        house.replica.breaks_once = ValueError("a row nobody can score")
        await house.open()
        running = asyncio.create_task(house.trainer.run())
        await house.replay.admit(await house.prompts.next_prompts(B))
        await house.answer()  # one batch, and no other will come
        with pytest.raises(ValueError, match="nobody can score"):
            await running

    run(case())


def test_the_next_steps_run_while_a_checkpoint_is_written_and_it_holds_what_was_when_it_was_cut(tmp_path):
    async def case():
        house = House(tmp_path, "trainer.save_freq=2", learner=SlowWriter(), steps=3)
        tasks = await start(house)
        await until(lambda: len(house.learner.trained) == 3 and house.replay.buffer.stats().trained == 3 * B)
        assert checkpoint_folder.latest(tmp_path) is None
        house.learner.may_write.set()
        await until(lambda: (tmp_path / "global_step_2").exists())
        saved = tmp_path / "global_step_2"
        state = msgspec.json.decode((saved / "trainer.json").read_bytes(), type=TrainerState)
        snapshot = msgspec.msgpack.decode((saved / "replay.msgpack").read_bytes(), type=ReplaySnapshot)
        assert (saved / "weights").read_text() == "2"
        assert (state.step, state.version, state.published, state.totals["steps"]) == (2, 2, 2, 2)
        assert snapshot.stats.trained == snapshot.mark == 2 * B
        await end(house, *tasks)
        assert checkpoint_folder.latest(tmp_path).name == "global_step_3"

    run(case())


def test_without_async_save_training_waits_and_generation_goes_on(tmp_path):
    async def case():
        house = House(tmp_path, "trainer.save_freq=1", "actor.checkpoint.async_save=false", learner=SlowWriter(), steps=3)
        tasks = await start(house)
        await until(lambda: house.trainer.saving.task is not None)
        pushed = house.replay.buffer.stats().trajectories_generated
        await until(lambda: house.replay.buffer.stats().ready == 2 * B)  # as many as may be alive
        assert len(house.learner.trained) == 1 and house.replay.buffer.stats().trajectories_generated >= pushed
        house.learner.may_write.set()
        await end(house, *tasks)
        assert len(house.learner.trained) == 3

    run(case())


def failures(house: House) -> float:
    return house.trainer.metrics.registry.get_sample_value("streamrl_checkpoint_failures_total")


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_one_clear_line(tmp_path):
    async def case():
        house = House(tmp_path, "trainer.save_freq=2", learner=SlowWriter(failures=1), steps=STEPS)
        house.learner.may_write.set()
        with pytest.raises(CheckpointError, match=r"step 2 is not saved in .*: .*No space left on device .*older checkpoints are as they were"):
            await end(house, *await start(house))
        assert list(tmp_path.glob(".*")) == [] and failures(house) == 1  # what was written of it takes no room

    run(case())


def test_or_the_run_goes_on_loudly_and_saves_again_when_it_is_due(tmp_path, caplog):
    async def case():
        house = House(
            tmp_path, "trainer.save_freq=2", "trainer.on_save_failure=continue", "trainer.max_ckpt_to_keep=9", learner=SlowWriter(failures=2), steps=STEPS
        )
        house.learner.may_write.set()
        with caplog.at_level(logging.ERROR):
            await end(house, *await start(house))
        assert caplog.text.count("NOT SAVED") == 2 and failures(house) == 2
        assert sum("NOT SAVED" in format_line(msgspec.to_builtins(record)) for record in house.records) == 2  # what the terminal shows
        assert sorted(path.name for path in tmp_path.glob("global_step_*")) == ["global_step_6", "global_step_8"]
        stats = house.replay.buffer.stats()
        assert stats.trained == STEPS * B and stats.lag_max <= 1

    run(case())


def test_the_last_checkpoint_must_be_written(tmp_path):
    async def case():
        house = House(tmp_path, "trainer.on_save_failure=continue", learner=SlowWriter(failures=1), steps=1)
        house.learner.may_write.set()
        with pytest.raises(CheckpointError, match="step 1 is not saved"):
            await end(house, *await start(house))

    run(case())


def test_a_failed_save_gives_nothing_up_that_a_rollback_needs(tmp_path):
    """The replay buffer hears of a checkpoint only when it is complete: until then a new learner takes all trained groups back."""

    async def case():
        house = House(tmp_path, "trainer.save_freq=1", "trainer.on_save_failure=continue", learner=SlowWriter(failures=99), steps=3)
        house.learner.may_write.set()
        with pytest.raises(CheckpointError):
            await end(house, *await start(house))
        assert await house.replay.rollback(0, None) == 3 * B

    run(case())

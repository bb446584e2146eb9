"""A trainer dies at any of its calls; its successor must train every group once. The learner dies; what its checkpoint lacks is trained again."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
import pytest

from streamrl.cli.audit import audit
from streamrl.learner import checkpoint_folder
from streamrl.pipeline.local import run_local
from streamrl.pipeline.standing import Standing
from tests.pipeline.test_trainer import B, House, Learner, run, uids
from tests.pipeline.tiny import tiny_config

STEPS = 3


class Died(Exception):
    """The trainer's process ends here."""


class Fuse:
    """Burns down at the ``point``-th of all beginnings and ends of calls."""

    def __init__(self, point: int) -> None:
        self.left = point

    def burn(self) -> None:
        self.left -= 1
        if self.left <= 0:
            raise Died


class Mortal:
    """An interface whose caller may die before or after any call, and makes none afterwards."""

    def __init__(self, target: Any, fuse: Fuse) -> None:
        self._target, self._fuse = target, fuse

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not asyncio.iscoroutinefunction(found):
            return found

        async def call(*arguments: Any) -> Any:
            self._fuse.burn()
            result = await found(*arguments)
            self._fuse.burn()
            return result

        return call


async def live_until(house: House, point: int) -> Standing | None:
    """Where the trainer stood when it died; None when it came to the end."""
    kept: list[bytes] = []
    house.trainer.keep = lambda standing: kept.append(msgspec.msgpack.encode(standing))
    await house.open()
    fuse = Fuse(point)
    house.trainer.replay = Mortal(house.replay, fuse)
    house.trainer.learner = house.trainer.stages.learner = Mortal(house.learner, fuse)
    try:
        await house.trainer.run()
        return None
    except Died:
        return msgspec.msgpack.decode(kept[-1], type=Standing)


def heir_of(house: House, folder, *overrides: str, learner: Any = None, steps: int = STEPS) -> House:
    """Another trainer in the same surroundings."""
    heir = House(folder, *overrides, steps=steps)
    heir.replay, heir.replica = house.replay, house.replica
    heir.trainer.replay = house.replay
    heir.trainer.learner = heir.trainer.stages.learner = learner or house.learner
    return heir


@pytest.mark.parametrize("skip", [frozenset(), frozenset({2})])
def test_a_trainer_may_die_at_any_call_and_its_successor_trains_each_group_once(tmp_path, skip):
    async def case(point: int) -> bool:
        house = House(tmp_path / str(point), learner=Learner(skip=skip), steps=STEPS)
        feeding = asyncio.create_task(house.keep_fed())
        standing = await live_until(house, point)
        if standing is not None:
            heir = heir_of(house, tmp_path / str(point))
            await heir.trainer.recall(standing)
            await heir.publisher.join(house.replica)
            await heir.trainer.run()
            assert heir.trainer.state.step == STEPS and heir.trainer.totals.steps == STEPS
        await feeding
        times = Counter(uid for keys in house.learner.trained for uid in uids(keys))
        stats = house.replay.buffer.stats()
        assert set(times.values()) == {1} and len(times) == STEPS * B
        assert stats.trained == (STEPS - len(skip)) * B and stats.dropped.get("skipped_step", 0) == len(skip) * B
        assert stats.lag_max <= 1 and house.replica.versions == sorted(house.replica.versions)
        return standing is not None

    point = 1
    while run(case(point)):
        point += 1
    assert point > 40


@pytest.mark.parametrize("point", [1, 20, 30, 36, 42])
def test_a_new_learner_goes_back_to_its_checkpoint_and_trains_again_what_came_after_it(tmp_path, point):
    async def case():
        house = House(tmp_path, "trainer.save_freq=2", steps=STEPS)
        feeding = asyncio.create_task(house.keep_fed())
        standing = await live_until(house, point)
        assert standing is not None
        saved = checkpoint_folder.latest(tmp_path)
        step = 0 if saved is None else checkpoint_folder.step_of(saved)
        heir = heir_of(house, tmp_path, "trainer.save_freq=2", learner=Learner())
        standing.totals.earlier_trajectories, standing.totals.earlier_tokens = 5, 17
        await heir.trainer.fall_back(standing)
        assert heir.trainer.state.step == step
        totals = heir.trainer.totals
        assert (totals.earlier_trajectories, totals.earlier_tokens) == (5, 17), "its driver is the same"
        assert totals.last_generated == house.replay.buffer.stats().tokens_generated, "and what was generated before is no rate of the next step"
        await heir.publisher.join(house.replica)
        await heir.trainer.run()
        await feeding
        kept = [uid for keys in [*house.learner.trained[:step], *heir.trainer.learner.trained] for uid in uids(keys)]
        assert len(kept) == len(set(kept)) == STEPS * B
        assert house.replay.buffer.stats().trained == STEPS * B
        assert house.replica.versions == sorted(house.replica.versions)

    run(case())


def test_a_learner_that_dies_while_its_last_version_travels_moves_the_number_by_two_and_costs_no_group(tmp_path):
    """One replica may hold that version already, so the restored weights get the next number. What would be too old under it is generated again."""

    async def case():
        house = House(tmp_path, "trainer.save_freq=2", steps=STEPS)
        kept: list[bytes] = []
        house.trainer.keep = lambda standing: kept.append(msgspec.msgpack.encode(standing))
        await house.open()
        feeding = asyncio.create_task(house.keep_fed())
        running = asyncio.create_task(house.trainer.run())
        while len(house.learner.trained) < 2:
            await asyncio.sleep(0)
        house.replica.gate.clear()  # version 2 is taken up by nobody
        while len(house.learner.snapshots) < 3 or msgspec.msgpack.decode(kept[-1], type=Standing).manifest.version < 2:
            await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        house.replica.gate.set()
        assert house.replay.buffer.published_version == 1
        heir = heir_of(house, tmp_path, "trainer.save_freq=2", learner=Learner())
        await heir.trainer.fall_back(msgspec.msgpack.decode(kept[-1], type=Standing))
        await heir.publisher.join(house.replica)
        await heir.trainer.run()
        await feeding
        assert house.replica.versions == [0, 1, 3, 4, 5, 6]
        assert len({uid for keys in heir.trainer.learner.trained for uid in uids(keys)}) == STEPS * B
        stats = house.replay.buffer.stats()
        assert stats.trained == STEPS * B and "stale" not in stats.dropped and "doomed" not in stats.dropped and stats.lag_max <= 1

    run(case())


def test_the_books_of_a_run_in_one_process_close(tmp_path):
    config = tiny_config(steps=2)
    totals = asyncio.run(run_local(config, tmp_path))
    report = audit(tmp_path)
    assert report.closes, report.differences
    assert report.groups.trained == totals.stats.trained == 2 * config.data.train_batch_size

"""Twelve stalls of a run in its real loops: each is blamed on its cause and not on who suffers, and a run that goes on is blamed on nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from streamrl.diagnosis import Diagnosis, RunView
from streamrl.diagnosis.answers import Table
from streamrl.diagnosis.roots import failing, unresponsive
from streamrl.errors import RewardError, SessionFailed
from streamrl.pipeline.health import health_of
from streamrl.protocol.groups import GroupLease
from streamrl.protocol.segments import StoreUse
from streamrl.protocol.waits import WaitTable
from streamrl.rewards.edge import as_reward_error
from streamrl.testing import PacedClock
from tests.dataplane.store_world import one_store
from tests.diagnosis.world import LIMIT_S, Engine, Prompts, Store, World
from tests.rollout.tools import worlds


def stall(world: World, condition: Callable[[Diagnosis], Any] = lambda found: found.verdict == "stuck", before: Callable[[World], Any] | None = None):
    """Run the world until ``condition`` holds of its diagnosis, after two steps and ``before``."""

    async def case() -> Diagnosis:
        async with world.running():
            if before is not None:
                await world.trained(2)
                before(world)
            return await world.named(condition)

    return asyncio.run(asyncio.wait_for(case(), 3 * LIMIT_S))


def waiters(found: Diagnosis) -> list[str]:
    return [link.waiter for link in found.chain]


async def forever(*_: Any) -> None:
    await asyncio.Event().wait()


def test_1_a_dead_engine(tmp_path: Path):
    found = stall(World(tmp_path, engine=Engine(hang_from=20)))
    assert found.culprit == "rollout-0 engine" and "requests in flight" in found.headline
    assert waiters(found)[:3] == ["trainer", "replay", "rollout-0"]


def test_2_a_tool_that_hangs(tmp_path: Path):
    async def use_tool(lease: GroupLease, session_id: int) -> None:
        await worlds.session(worlds.Recorder("search", forever), timeout_s=60.0).call([worlds.call("search")])

    found = stall(World(tmp_path, then=use_tool))
    assert found.culprit == "tool search" and "rollout.timeouts.tool_s" in found.next_step
    assert found.chain[-1].what == "a call" and 0 < (found.chain[-1].left_s or 0) < 60


def test_3_a_full_store(tmp_path: Path):
    with one_store(tmp_path, put_timeout_s=30.0) as (store, index):
        numbers = iter(range(10**6))

        async def put(rows: list[Any], tags: list[Any]) -> None:
            await store.async_kv_batch_put([f"u{next(numbers)}_0_0"], "train", {"x": [np.zeros(300 << 10, np.uint8)]})

        def use() -> StoreUse:
            return StoreUse(index._pool.capacity_bytes, index._pool.allocated_bytes, bytes_live=index._pool.allocated_bytes)

        found = stall(World(tmp_path / "run", store=Store(put), store_use=use))
    assert found.culprit == "store" and "is full" in found.headline and "dataplane.capacity_bytes" in found.next_step


def test_4_a_slow_learner_is_the_bottleneck_and_no_fault(tmp_path: Path):
    world = World(tmp_path, slow_s=0.25, stall_s=10.0)
    found = stall(world, lambda found: found.culprit == "learner-0" and found.chain)
    assert found.verdict == "fine" and "the slowest part is learner-0" in found.headline

    async def a_while() -> list[Diagnosis]:
        seen = []
        async with world.running():
            for _ in range(30):
                seen.append(world.look())
                await asyncio.sleep(0.05)
        return seen

    world = World(tmp_path / "again", slow_s=0.25)
    assert [found for found in asyncio.run(a_while()) if found.is_alarm] == []


def test_5_a_publication_that_is_stuck(tmp_path: Path):
    found = stall(World(tmp_path, engine=Engine(load=asyncio.Event())))
    assert found.culprit == "rollout-0 engine" and "has not taken up version 2" in found.headline
    assert "weights.publish_timeout_s" in found.next_step


def test_6_all_rewards_fail(tmp_path: Path):
    async def score(lease: GroupLease, session_id: int) -> None:
        with as_reward_error("reward.remote (http://judge)", 30.0):
            raise RewardError("a remote scorer answers, got HTTP 503")

    async def as_session(lease: GroupLease, session_id: int) -> None:
        try:
            await score(lease, session_id)
        except RewardError as error:
            raise SessionFailed(str(error), reason="reward_error") from error

    found = stall(World(tmp_path, "replay.breaker_window=4", "replay.breaker_cooldown_s=60", then=as_session))
    assert found.culprit == "scorer reward.remote (http://judge)" and "HTTP 503" in found.headline and "logs/rollout-0.log" in found.next_step


def test_7_one_session_that_never_ends(tmp_path: Path):
    async def hang_one(lease: GroupLease, session_id: int) -> None:
        if lease.uid == "p5" and session_id == 1:
            await asyncio.Event().wait()

    found = stall(World(tmp_path, then=hang_one))
    assert found.culprit == "agent loop single_turn_agent" and "session p5/1" in found.headline
    assert any("1 of 2 sessions have ended" in link.note for link in found.chain)


def test_8_an_empty_data_source(tmp_path: Path):
    found = stall(World(tmp_path, prompts=Prompts(dry_after=9)))
    assert found.culprit == "data source" and waiters(found) == ["trainer", "replay", "prompt"]


def test_9_a_rank_that_does_not_come_to_a_collective(tmp_path: Path):
    found = stall(World(tmp_path, ranks=3, hang_rank=1))
    assert found.culprit == "learner-1" and "learner-0, learner-2 wait" in found.headline


def test_10_a_rollout_actor_without_slots(tmp_path: Path):
    closed = ExitStack()
    found = stall(World(tmp_path), before=lambda world: closed.enter_context(world.gate.closed()))
    assert found.culprit == "rollout-0" and "gate is closed" in found.headline and "a free session slot" in [link.what for link in found.chain]


def test_10_slots_that_sessions_of_lost_groups_hold(tmp_path: Path):
    async def linger(lease: GroupLease, session_id: int) -> None:
        if lease.seq_no > 9:
            await worlds.session(worlds.Recorder("search", forever), timeout_s=60.0).call([worlds.call("search")])

    async def case() -> Diagnosis:
        world = World(tmp_path, then=linger, slots=4)
        async with world.running():
            await world.named(lambda found: found.culprit == "tool search")
            await world.replay.release_worker("rollout-0")
            return await world.named(lambda found: "a free session slot" in [link.what for link in found.chain])

    found = asyncio.run(asyncio.wait_for(case(), 3 * LIMIT_S))
    assert found.culprit == "tool search" and any("4 of 4 session slots are taken" in line for line in found.evidence)


def test_11_a_clock_that_runs_ahead_takes_every_lease_away(tmp_path: Path):
    async def slowly(lease: GroupLease, session_id: int) -> None:
        await asyncio.sleep(0.3)

    settings = ("replay.lease_s=10", "replay.max_attempts=1000", "replay.breaker_window=10000")
    found = stall(World(tmp_path, *settings, clock=PacedClock(rate=400.0), then=slowly))
    assert found.culprit == "clock of replay" and "too fast" in found.headline


def test_11_a_machine_whose_clock_is_off_is_named_and_its_times_are_corrected(tmp_path: Path):
    world = World(tmp_path, engine=Engine(hang_from=20))
    world.skew_s = {"rollout-0": 3600.0}
    found = stall(world)
    assert found.culprit == "rollout-0 engine" and any("clock of rollout-0 is 1 h 0 min ahead" in line for line in found.evidence)
    assert all(link.since_s is None or link.since_s < LIMIT_S for link in found.chain)


def test_12_a_partition_between_a_rollout_actor_and_the_replay_buffer(tmp_path: Path):
    found = stall(World(tmp_path, "replay.lease_s=1", worker_channel=True), before=lambda world: world.channel.cut())
    assert found.culprit == "connection between rollout-0 and replay" and "both answer the driver" in found.headline


@pytest.mark.parametrize("deaf", ["learner-0", "rollout-0", "replay", "prompt", "trainer"])
def test_an_actor_that_does_not_answer_is_told_from_one_that_waits(tmp_path: Path, deaf: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("streamrl.diagnosis.roots.unresponsive.__defaults__", (0.3,))

    async def hang(lease: GroupLease, session_id: int) -> None:
        if lease.seq_no > 9 and deaf != "prompt":
            await asyncio.Event().wait()

    world = World(tmp_path, then=hang, prompts=Prompts(dry_after=9 if deaf == "prompt" else None), ranks=1, hang_rank=0 if deaf == "learner-0" else None)
    found = stall(world, before=lambda world: (world.look(), world.deaf.add(deaf)))
    assert found.culprit == deaf and "event loop is blocked" in found.headline


def test_a_run_that_goes_on_raises_no_alarm(tmp_path: Path):
    async def case() -> list[Diagnosis]:
        world, seen = World(tmp_path, ranks=2), []
        async with world.running():
            for _ in range(60):
                seen.append(world.look())
                await asyncio.sleep(0.05)
            assert world.trainer.totals.steps > 20
        return seen

    seen = asyncio.run(asyncio.wait_for(case(), 3 * LIMIT_S))
    assert {found.verdict for found in seen} <= {"fine", "waiting"} and sum(found.verdict == "fine" for found in seen) > len(seen) * 0.8


def test_an_actor_that_is_being_opened_may_be_silent(tmp_path: Path):
    world = World(tmp_path)
    opening = msgspec.structs.replace(world.health("rollout-0"), is_open=False)
    table = world.answers.take({name: opening if name == "rollout-0" else world.health(name) for name in world.tables}, time.time())
    actors, now = dict(table.actors) | {"rollout-0": None}, time.time() + 60
    heard = dict(table.heard) | {"rollout-0": msgspec.structs.replace(table.heard["rollout-0"], last=opening)}
    root = unresponsive(RunView(now, Table(now, actors, heard)), "rollout-0")
    assert root is not None and not root.certain and "is being opened" in root.says


def test_a_push_that_takes_a_moment_is_no_partition(tmp_path: Path):
    async def case() -> list[Diagnosis]:
        world, seen = World(tmp_path, worker_channel=True, stall_s=30.0), []
        world.channel.delay_s = 0.05
        async with world.running():
            for _ in range(60):
                seen.append(world.look())
                await asyncio.sleep(0.02)
        return seen

    seen = asyncio.run(asyncio.wait_for(case(), 3 * LIMIT_S))
    assert any(link.what == "its push" for found in seen for link in found.chain) and {found.verdict for found in seen} == {"fine"}


def test_the_sessions_of_one_bad_row_are_no_failing_scorer(tmp_path: Path):
    table = WaitTable("rollout-0")

    def fail(uid: str) -> None:
        for session in range(8):
            with pytest.raises(RewardError), table.activity(f"{uid}/{session}"), as_reward_error("mine", 1.0):
                raise RewardError("no answer key")

    def culprit() -> str | None:
        now = time.time() + 30
        root = failing(RunView(now, Table(now, {"rollout-0": health_of(table)})), ["rollout-0"])
        return None if root is None else root.culprit

    fail("p1")
    fail("p2")
    assert culprit() is None
    fail("p3")
    fail("p4")
    assert culprit() == "scorer mine"

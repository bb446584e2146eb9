"""Real loops around a trainer whose run can't go on: it ends by itself, before its deadline, in one error that says why. Seconds, not hours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.config.rollout import ReplayConfig
from streamrl.errors import BreakerOpen, StoreFull, TakeTimeout
from streamrl.pipeline.loops import cancel_all, feed_prompts, generate_groups, keep_leases
from streamrl.protocol.clock import SystemClock
from streamrl.protocol.groups import GroupLease
from streamrl.protocol.trajectory import Trajectory
from streamrl.protocol.waits import WaitTable
from streamrl.replay import ReplayBuffer, ReplayService
from streamrl.telemetry.metrics import Metrics
from streamrl.testing import make_trajectory
from tests.dataplane.store_world import one_store
from tests.pipeline.test_loops import Runner, Store, worker
from tests.pipeline.test_trainer import B, House, N

DEADLINE_S = 2.0
TAKE = "replay.take_timeout_s=0.5"


class Answers(Runner):
    """Good answers under the published version; ``failing`` and ``hang`` as in Runner, ``hang_in`` only in these groups."""

    def __init__(self, house: House, failing: Any = None, hang_in: set[str] = frozenset()) -> None:
        super().__init__(failing)
        self._house = house
        self._hang_in = hang_in

    async def run(self, lease: GroupLease, session_id: int, retry: int) -> list[Trajectory]:
        if lease.uid in self._hang_in and session_id == 0:
            await asyncio.Event().wait()
        await super().run(lease, session_id, retry)
        return [make_trajectory(lease.uid, session_id, version=self._house.replay.buffer.published_version)]


async def run_house(house: House, runner: Runner | None = None, store: Store | None = None) -> None:
    """All loops; the first error of any of them is the run's."""
    await house.open()
    loops = [house.trainer.run(), house.replay.run_timers()]
    loops.append(feed_prompts(house.prompts, house.replay, chunk=B, waits=WaitTable("prompt"), metrics=Metrics("prompt", "prompt")))
    if runner is not None:
        rollout = worker(house.replay, store or Store(), runner)
        loops += [generate_groups(rollout, n=N), keep_leases(rollout, ReplayConfig(heartbeat_s=0.05), SystemClock())]
    training, *others = tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        open_tasks = set(others)
        while not training.done():
            done, _ = await asyncio.wait({training, *open_tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in done & open_tasks:
                open_tasks.discard(task)
                task.result()
        training.result()
    finally:
        await cancel_all(tasks)


def failing(reason: str) -> dict[tuple[int, int], tuple[str, bool]]:
    return {(session, retry): (reason, True) for session in range(N) for retry in range(2)}


STALLS: dict[str, tuple[list[str], Callable[[House], dict[str, Any]], type[Exception], str]] = {
    "no producer": ([TAKE], lambda house: {}, TakeTimeout, "no rollout actor: 4 group"),
    "all sessions fail": (
        ["replay.breaker_window=4", "replay.breaker_cooldown_s=0.05", "replay.breaker_max_trials=2"],
        lambda house: {"runner": Answers(house, failing("reward_error"))},
        BreakerOpen,
        "'reward_error' and 2 failed trials",
    ),
    "a group never completes, bound 0": (
        [TAKE, "replay.max_staleness=0"],
        lambda house: {"runner": Answers(house, hang_in={"p1"})},
        TakeTimeout,
        "p1 seq_no 1 running attempt 1 .* worker rollout-0, 1 of 2 sessions settled",
    ),
    "every group hangs": (
        [TAKE],
        lambda house: {"runner": Answers(house, hang_in={f"p{i}" for i in range(9)})},
        TakeTimeout,
        "running 4.*worker rollout-0, 1 of 2 sessions settled",
    ),
    "a full store": ([TAKE], lambda house: {"runner": Answers(house), "store": Store(full=True)}, StoreFull, "no room"),
}


@pytest.mark.parametrize("name", STALLS)
def test_a_run_that_cannot_go_on_ends_before_its_deadline_with_the_reason(tmp_path: Path, name: str):
    overrides, parts, error, said = STALLS[name]

    async def case() -> None:
        house = House(tmp_path, *overrides)
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(error, match=said):
                await run_house(house, **parts(house))

    asyncio.run(case())


def dropped_on_the_way(house: House) -> dict[str, int]:
    """Without those that were unfinished at the end."""
    return {reason: count for reason, count in house.trainer.totals.stats.dropped.items() if reason != "shutdown"}


@pytest.mark.parametrize(("override", "reason"), [("replay.wait_s=0.2", "stale"), ("replay.max_off_policy_strategy=drop", "doomed")])
def test_a_group_that_never_completes_costs_itself_and_not_the_run(tmp_path: Path, override: str, reason: str):
    async def case() -> None:
        house = House(tmp_path, override, steps=6)
        async with asyncio.timeout(DEADLINE_S):
            await run_house(house, runner=Answers(house, hang_in={"p1"}))
        assert house.trainer.totals.stats.trained == 6 * B and house.trainer.totals.stats.lag_max <= 1
        assert dropped_on_the_way(house) == {reason: 1}

    asyncio.run(case())


def test_bound_zero_with_a_slow_publication_makes_progress_and_nothing_is_admitted_meanwhile(tmp_path: Path):
    async def case() -> None:
        house = House(tmp_path, "replay.max_staleness=0", steps=5)
        take_up = house.replica.update_weights

        async def slowly(manifest: Any) -> Any:
            before = house.replay.buffer.stats().admitted
            await asyncio.sleep(0.05)
            assert house.replay.buffer.stats().admitted == before
            return await take_up(manifest)

        house.replica.update_weights = slowly  # type: ignore[method-assign]
        async with asyncio.timeout(DEADLINE_S):
            await run_house(house, runner=Answers(house))
        assert house.trainer.totals.stats.trained == 5 * B and house.trainer.totals.stats.lag_max == 0
        assert dropped_on_the_way(house) == {}

    asyncio.run(case())


def test_b074_one_retry_layer_asks_as_often_as_configured_and_a_retry_keeps_its_session(tmp_path: Path):
    async def case() -> None:
        house = House(tmp_path, "replay.max_attempts=3", "replay.max_inflight_groups=1", "replay.breaker_window=1000")
        runner = Answers(house, failing("engine_error"))  # session_retries is 1
        running = asyncio.create_task(run_house(house, runner=runner))
        async with asyncio.timeout(DEADLINE_S):
            while not house.replay.buffer.stats().dropped.get("quarantined"):
                await asyncio.sleep(0.001)
        await cancel_all([running])
        asked = [session for uid, session, _ in runner.calls if uid == "p0"]
        assert sorted(asked) == sorted(list(range(N)) * 3 * 2)

    asyncio.run(case())


def test_b058_a_full_store_holds_back_the_put_and_nothing_else_on_its_loop(tmp_path: Path):
    async def case() -> None:
        with one_store(tmp_path, put_timeout_s=5.0) as (store, index):
            rows = np.zeros(500 << 10, np.uint8)
            for number in range(2):
                await store.async_kv_batch_put([f"u{number}_0_0"], "train", {"x": [rows]})
            waiting = asyncio.create_task(store.async_kv_batch_put(["u2_0_0"], "train", {"x": [rows]}))
            service = ReplayService(ReplayBuffer(ReplayConfig(), groups_per_step=1, n=1))
            for _ in range(20):
                begun = time.perf_counter()
                await asyncio.sleep(0)
                await service.heartbeat("w")
                await index.use()
                assert time.perf_counter() - begun < 0.1
                await asyncio.sleep(0.005)
            assert not waiting.done()
            await store.async_kv_clear(["u0_0_0"], "train")
            await asyncio.wait_for(waiting, DEADLINE_S)

    asyncio.run(case())


def test_the_loops_show_their_waits_since_they_began_and_until_the_deadline_that_ends_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("streamrl.pipeline.loops.POLL_S", 0.01)

    async def case() -> None:
        house = House(tmp_path)
        prompt, rollout = WaitTable("prompt"), worker(house.replay, Store(), Answers(house, hang_in={f"p{i}" for i in range(99)}), slots=N)
        feeding = feed_prompts(house.prompts, house.replay, chunk=B, waits=prompt, metrics=Metrics("prompt", "prompt"), limit_s=60.0)
        idle = worker(house.replay, Store(), Runner())
        idle.name = "rollout-1"
        tasks = [asyncio.create_task(loop) for loop in (feeding, generate_groups(rollout, n=N), generate_groups(idle, n=N))]
        began = time.time()
        await asyncio.sleep(0.1)
        seen = {(row.what, row.limit_s): row.since for table in (prompt, rollout.waits) for row in table.rows()}
        assert seen.keys() >= {("an admission slot", 60.0), ("a free session slot", 3600.0)}
        assert all(since < began + 0.08 for since in seen.values())
        await cancel_all(tasks)

    asyncio.run(case())

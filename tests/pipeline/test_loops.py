"""The loops alone, over scripted peers."""

from __future__ import annotations

import asyncio

import pytest

from streamrl.config.rollout import ReplayConfig
from streamrl.errors import EngineError, SessionFailed, StaleWrite, StoreFull, WaitTimeout
from streamrl.pipeline.loops import GroupWorker, feed_prompts, generate_groups, keep_leases
from streamrl.protocol.clock import SystemClock
from streamrl.protocol.groups import AdmissionReply, GroupLease, Heartbeat, LeaseReply, SessionPush, SpentTokens
from streamrl.protocol.trajectory import Prompt, Trajectory
from streamrl.protocol.waits import WaitTable
from streamrl.telemetry.metrics import Metrics
from streamrl.testing import make_trajectory

LIMIT_S = 5.0


def lease(uid: str, n: int = 2, attempt: int = 1) -> GroupLease:
    return GroupLease(uid, attempt, 0, {"data_source": "toy"}, n, 0)


def row(uid: str, session_id: int) -> Trajectory:
    return make_trajectory(uid, session_id, version=3)


class Replay:
    """Hands out the given leases, then closes; records what comes back."""

    def __init__(self, leases: list[GroupLease], refuse: set[str] = frozenset()) -> None:
        self.leases = list(leases)
        self.refuse = refuse
        self.pushed: list[SessionPush] = []
        self.cancel: list[tuple[str, int]] = []
        self.hold_open = asyncio.Event()
        self.spent_tokens: list[tuple[str | None, int]] = []

    async def lease(self, worker: str, max_groups: int, wait_s: float) -> LeaseReply:
        if not self.leases:
            await self.hold_open.wait()
            return LeaseReply([], closed=True)
        given, self.leases = self.leases[:max_groups], self.leases[max_groups:]
        return LeaseReply(given)

    async def push(self, session: SessionPush) -> bool:
        if session.uid in self.refuse:
            raise StaleWrite("the group has ended, got a push; stop")
        self.pushed.append(session)
        return True

    async def heartbeat(self, worker: str) -> Heartbeat:
        cancel, self.cancel = self.cancel, []
        return Heartbeat(cancel)

    async def spent(self, worker: str, spent: list[SpentTokens]) -> int:
        self.spent_tokens += [(tokens.uid, tokens.tokens) for tokens in spent]
        return sum(tokens.tokens for tokens in spent)


class Store:
    def __init__(self, full: bool = False) -> None:
        self.rows: dict[str, Trajectory] = {}
        self.full = full

    async def put_trajectories(self, rows, tags) -> None:
        if self.full:
            raise StoreFull("no room")
        self.rows |= {str(r.key): r for r in rows}


class Runner:
    """Answers at once; ``failing`` maps (session, retry) to a reason; ``hang`` sessions never end."""

    def __init__(self, failing=None, hang: set[int] = frozenset()) -> None:
        self.failing = failing or {}
        self.hang = hang
        self.calls: list[tuple[str, int, int]] = []
        self.cancelled = 0

    async def run(self, lease: GroupLease, session_id: int, retry: int) -> list[Trajectory]:
        self.calls.append((lease.uid, session_id, retry))
        if session_id in self.hang:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1
        if (session_id, retry) in self.failing:
            raise SessionFailed("scripted", *self.failing[session_id, retry])
        return [row(lease.uid, session_id)]


def worker(replay, store, runner, slots: int = 8, retries: int = 1, check_engine=lambda: None) -> GroupWorker:
    return GroupWorker(
        "rollout-0",
        replay=replay,
        store=store,
        runner=runner,
        slots=slots,
        session_retries=retries,
        check_engine=check_engine,
        waits=WaitTable("rollout-0"),
        metrics=Metrics("rollout", "rollout-0"),
    )


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


async def drain(w: GroupWorker, replay: Replay) -> None:
    """Run the loop until every lease has ended, then close."""
    task = asyncio.create_task(generate_groups(w, n=2))
    while replay.leases or any(not t.done() for t in w.groups.values()) or (not w.groups and not replay.pushed):
        await asyncio.sleep(0.001)
        if task.done():
            break
    replay.hold_open.set()
    await task


def test_every_session_of_a_lease_is_pushed_once_after_its_rows_are_stored():
    async def case():
        replay, store = Replay([lease("a"), lease("b")]), Store()
        await drain(worker(replay, store, Runner()), replay)
        assert sorted((p.uid, p.session_id) for p in replay.pushed) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
        assert {key for p in replay.pushed for key in p.keys} == set(store.rows)
        assert replay.pushed[0].tags[0]["min_global_steps"] == 3

    run(case())


def test_a_failing_session_is_retried_then_pushed_as_failed_and_its_sibling_is_untouched():
    async def case():
        failing = {(0, 0): ("engine_error", True), (0, 1): ("reward_error", True)}
        replay, runner = Replay([lease("a")]), Runner(failing)
        await drain(worker(replay, Store(), runner), replay)
        reasons = {p.session_id: p.reason for p in replay.pushed}
        assert reasons == {0: "reward_error", 1: None}
        assert [c for c in runner.calls if c[1] == 0] == [("a", 0, 0), ("a", 0, 1)]

    run(case())


def test_a_reason_that_no_repeat_cures_is_not_retried():
    async def case():
        replay, runner = Replay([lease("a")]), Runner({(0, 0): ("overlong", False)})
        await drain(worker(replay, Store(), runner), replay)
        assert [c for c in runner.calls if c[1] == 0] == [("a", 0, 0)]
        assert not next(p for p in replay.pushed if p.session_id == 0).retryable

    run(case())


def test_a_refused_push_ends_the_group_but_not_the_worker():
    async def case():
        replay, store = Replay([lease("gone"), lease("b")], refuse={"gone"}), Store()
        await drain(worker(replay, store, Runner()), replay)
        assert {p.uid for p in replay.pushed} == {"b"}

    run(case())


def test_a_broken_engine_ends_the_loop_instead_of_failing_session_after_session():
    async def case():
        def broken() -> None:
            raise EngineError("the engine core has ended")

        replay, runner = Replay([lease("a")]), Runner({(0, 0): ("engine_error", True)})
        with pytest.raises(EngineError):
            await drain(worker(replay, Store(), runner, check_engine=broken), replay)
        assert all(p.reason is None for p in replay.pushed)

    run(case())


def test_a_full_store_ends_the_loop_with_its_own_error():
    async def case():
        replay = Replay([lease("a")])
        with pytest.raises(StoreFull):
            await drain(worker(replay, Store(full=True), Runner()), replay)

    run(case())


def test_a_lease_that_was_taken_away_is_cancelled_within_a_beat():
    async def case():
        replay, runner = Replay([lease("a")]), Runner(hang={0, 1})
        w = worker(replay, Store(), runner)
        loop = asyncio.create_task(generate_groups(w, n=2))
        beats = asyncio.create_task(keep_leases(w, ReplayConfig(heartbeat_s=0.01), SystemClock()))
        while len(runner.calls) < 2:
            await asyncio.sleep(0.001)
        replay.cancel.append(("a", 1))
        while runner.cancelled < 2:
            await asyncio.sleep(0.001)
        assert w.sessions == 0
        beats.cancel()
        replay.hold_open.set()
        await loop

    run(case())


def test_no_more_groups_are_leased_than_session_slots_allow():
    async def case():
        replay, runner = Replay([lease(u) for u in "abcd"]), Runner(hang={0})
        w = worker(replay, Store(), runner, slots=4)
        loop = asyncio.create_task(generate_groups(w, n=2))
        await asyncio.sleep(0.05)
        assert w.sessions == 4 and len(replay.leases) == 2
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        assert runner.cancelled == 2

    run(case())


class Prompts:
    def __init__(self, total: int) -> None:
        self.left = total
        self.given = 0

    async def next_prompts(self, count: int) -> list[Prompt]:
        count = min(count, self.left)
        self.left -= count
        self.given += count
        return [Prompt(f"u{self.given - i}", {}, 0, self.given - i) for i in range(count)]


class Gate:
    """Admission with a scripted number of slots."""

    def __init__(self, slots: list[int]) -> None:
        self.slots = list(slots)
        self.admitted: list[str] = []
        self.ended = False

    async def admission(self, max_groups: int, wait_s: float) -> AdmissionReply:
        if not self.slots:
            return AdmissionReply(0, closed=True)
        return AdmissionReply(min(self.slots.pop(0), max_groups))

    async def admit(self, prompts: list[Prompt]) -> list[int]:
        self.admitted += [p.uid for p in prompts]
        return []

    async def end_of_prompts(self) -> None:
        self.ended = True


def feed(prompts: Prompts, gate: Gate, chunk: int = 4) -> None:
    run(feed_prompts(prompts, gate, chunk=chunk, waits=WaitTable("prompt"), metrics=Metrics("prompt", "prompt")))


def test_prompts_are_drawn_only_for_free_slots():
    prompts, gate = Prompts(100), Gate([3, 0, 9])
    feed(prompts, gate)
    assert prompts.given == len(gate.admitted) == 7
    assert not gate.ended


def test_the_end_of_the_data_is_told_once_after_the_last_prompt():
    prompts, gate = Prompts(5), Gate([4, 4, 4])
    feed(prompts, gate)
    assert len(gate.admitted) == 5 and gate.ended


def test_a_wait_under_a_limit_never_swallows_a_cancellation():
    async def case():
        answer = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(WaitTable("trainer").limit(answer, "an answer", "learner", 60))
        await asyncio.sleep(0)
        answer.set_result(1)  # both in one turn of the loop
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(case())


def test_a_limit_names_the_wait_and_leaves_the_callees_own_timeout_alone():
    async def never() -> None:
        await asyncio.Event().wait()

    async def late() -> None:
        raise TimeoutError("a socket")

    waits = WaitTable("trainer")
    with pytest.raises(WaitTimeout, match=r"trainer waited 0\.01 s for weights of learner"):
        run(waits.limit(never(), "weights", "learner", 0.01))
    with pytest.raises(TimeoutError, match="a socket"):
        run(waits.limit(late(), "weights", "learner", 60))
    assert waits.rows() == []


def test_an_engine_that_breaks_while_idle_ends_the_loop():
    async def case():
        def broken() -> None:
            raise EngineError("the engine core has ended")

        with pytest.raises(EngineError):
            await keep_leases(worker(Replay([]), Store(), Runner(), check_engine=broken), ReplayConfig(heartbeat_s=0.01), SystemClock())

    run(case())

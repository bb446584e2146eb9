"""Random events: completions out of order, crashes, expiries, late writes, publications. After each one everything must add up."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streamrl.config.rollout import ReplayConfig
from streamrl.errors import BreakerOpen, Closed, LeaseExpired, StaleWrite
from streamrl.protocol.groups import GroupLease, TakenBatch
from streamrl.replay import ReplayBuffer
from tests.replay.replay_world import HandClock, bad, check_world, good, prompts

N, B = 2, 2
WORKERS = ("w0", "w1", "w2")


class World:
    """A buffer, three workers and one or two learners, with the book that a suspicious outsider would keep."""

    def __init__(self, bound: int, strategy: str) -> None:
        self.clock = HandClock()
        config = ReplayConfig(max_staleness=bound, max_off_policy_strategy=strategy, wait_s=40, lease_s=20, breaker_window=1000)  # type: ignore[arg-type]
        self.buffer = ReplayBuffer(config, groups_per_step=B, n=N, clock=self.clock)
        self.bound = bound
        self.next_prompt = 0
        self.leases: list[tuple[str, GroupLease]] = []
        self.batches: list[TakenBatch] = []
        self.trained: list[str] = []
        self.engine_version: dict[tuple[str, int], int] = {}
        self.ended = False

    def admit(self) -> None:
        if not self.ended:
            slots = self.buffer.admission(3).slots
            self.buffer.admit(prompts(slots, self.next_prompt))
            self.next_prompt += slots

    def lease(self, worker: str) -> None:
        for lease in self.buffer.lease(worker, 2).leases:
            self.leases.append((worker, lease))
            self.engine_version[(lease.uid, lease.attempt)] = self.buffer.published_version

    def push(self, pick: int, kind: str) -> None:
        if not self.leases:
            return
        self.leases = self.leases[-12:]  # old ones stay for late pushes
        _, lease = self.leases[pick % len(self.leases)]
        version = self.engine_version[(lease.uid, lease.attempt)]
        session = (pick // 97) % N
        push = good(lease, session, version, rows=1 + pick % 2) if kind == "good" else bad(lease, session, "env_error", retryable=kind == "bad")
        alive = self.buffer.table.groups.get(lease.uid)
        known = alive.sessions.get(session) if alive is not None and alive.attempt == lease.attempt else None
        if known is not None and (known.keys != push.keys or known.reason != push.reason):
            return  # a well-behaved worker pushes a session once
        fresh = alive is not None and alive.attempt == lease.attempt and alive.state == "running"
        try:
            assert self.buffer.push(push) is (known is None)
            assert fresh or known is not None
        except StaleWrite:
            assert not fresh

    def take(self, num_groups: int) -> None:
        try:
            batch = self.buffer.take(num_groups)
        except Closed:
            self.ended = True
            return
        if batch is not None:
            assert len(batch.uids) == num_groups and max(batch.lags) <= self.bound
            seq = [self.buffer.table.groups[uid].seq_no for uid in batch.uids]
            assert seq == sorted(seq)
            held = {uid for other in self.batches for uid in other.uids}
            assert not held & set(batch.uids) and not set(self.trained) & set(batch.uids)
            self.batches.append(batch)

    def end_batch(self, how: str) -> None:
        if not self.batches:
            return
        batch = self.batches.pop(0)
        if how == "abandon":
            self.buffer.abandon(batch.lease_id)
            with pytest.raises(LeaseExpired):
                self.buffer.commit(batch.lease_id)
        elif how == "skip":
            self.buffer.skip(batch.lease_id)
        else:
            stale = self.buffer.check_bound(batch.lease_id)
            left = [uid for uid in batch.uids if uid not in stale]
            assert all(self.buffer.table.groups[uid].lag <= self.bound for uid in left)
            rejected = left[:1] if how == "reject" else []
            self.buffer.commit(batch.lease_id, rejected)
            self.trained += [uid for uid in left if uid not in rejected]

    def publish(self) -> None:
        if self.buffer.stats().trained_unpublished:
            self.buffer.published(self.buffer.published_version + 1)

    def give_back(self, pick: int) -> None:
        if self.leases:
            worker, lease = self.leases[pick % len(self.leases)]
            self.buffer.give_back(worker, [(lease.uid, lease.attempt)])

    def pass_time(self, seconds: float) -> None:
        self.clock.pass_s(seconds)
        self.buffer.expire()

    def clear(self) -> None:
        self.buffer.garbage_cleared(self.buffer.collect_garbage())

    def restart(self) -> None:
        snapshot = self.buffer.snapshot()
        config = self.buffer.config
        self.buffer = ReplayBuffer(config, groups_per_step=B, n=N, clock=self.clock)
        self.buffer.restore(snapshot)
        self.buffer.published(snapshot.published_version + 1)
        self.leases, self.batches = [], []

    def check(self) -> None:
        check_world(self.buffer)
        assert len(set(self.trained)) == len(self.trained) == self.buffer.stats().trained
        assert self.buffer.stats().lag_max <= self.bound


class ReplayMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None

    @precondition(lambda self: self.world is None)
    @rule(bound=st.integers(0, 2), strategy=st.sampled_from(["wait", "drop"]))
    def begin(self, bound, strategy):
        self.world = World(bound, strategy)

    @precondition(lambda self: self.world is not None)
    @rule(data=st.data())
    def event(self, data):
        step(self.world, data.draw(st.integers(0, 10**6)))

    @invariant()
    def adds_up(self):
        if self.world is not None:
            self.world.check()


def step(world: World, number: int) -> None:
    """One event chosen by ``number``."""
    rng = random.Random(number)
    kind = rng.choices(
        ["admit", "lease", "push", "take", "end", "publish", "give_back", "die", "time", "clear", "beat", "restart", "finish"],
        [6, 8, 30, 8, 8, 6, 1, 1, 2, 6, 2, 0.3, 0.1],
    )[0]
    pick, worker = rng.randrange(10**6), rng.choice(WORKERS)
    if kind == "admit":
        world.admit()
    elif kind == "lease":
        world.lease(worker)
    elif kind == "push":
        world.push(pick, rng.choices(["good", "bad", "fatal"], [16, 3, 1])[0])
    elif kind == "take":
        world.take(rng.choice([1, 2, 2, 2, 3]))
    elif kind == "end":
        world.end_batch(rng.choices(["commit", "reject", "skip", "abandon"], [10, 2, 1, 2])[0])
    elif kind == "publish":
        world.publish()
    elif kind == "give_back":
        world.give_back(pick)
    elif kind == "die":
        world.buffer.release_worker(worker)
    elif kind == "time":
        world.pass_time(rng.choice([1, 15, 45]))
    elif kind == "clear":
        world.clear()
    elif kind == "beat":
        world.buffer.heartbeat(worker)
    elif kind == "restart":
        world.restart()
    elif kind == "finish":
        world.buffer.end_of_prompts()
        world.ended = True


TestReplayMachine = ReplayMachine.TestCase
TestReplayMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("strategy", ["wait", "drop"])
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_long_random_runs_add_up_after_every_event(bound, strategy):
    for seed in range(12):
        world, rng = World(bound, strategy), random.Random(seed)
        for _ in range(400):
            try:
                step(world, rng.randrange(10**9))
            except BreakerOpen:
                break
            world.check()


@pytest.mark.parametrize("strategy", ["wait", "drop"])
@pytest.mark.parametrize("bound", [0, 1, 2])
def test_a_run_always_makes_progress_with_crashing_workers_and_a_slow_publisher(bound, strategy):
    world, rng = World(bound, strategy), random.Random(7)
    for turn in range(600):
        world.admit()
        world.clear()
        world.lease(rng.choice(WORKERS))
        for _ in range(16):
            world.push(rng.randrange(10**6), "good")
        if turn % 17 == 0:
            world.buffer.release_worker(rng.choice(WORKERS))
        world.take(B)
        world.end_batch("commit")
        if turn % 3 == 0:
            world.publish()
        world.pass_time(3)
        world.check()
    assert len(world.trained) > 100


def test_the_same_events_choose_the_same_groups():
    def run():
        world, rng = World(1, "wait"), random.Random(3)
        for _ in range(800):
            step(world, rng.randrange(10**9))
        return world.trained, world.buffer.stats()

    assert run() == run()

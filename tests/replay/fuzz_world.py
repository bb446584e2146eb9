"""A whole run's worth of random events around a replay buffer, and the book that a suspicious outsider would keep."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from streamrl.cli.audit import audit
from streamrl.config.rollout import ReplayConfig
from streamrl.errors import Closed, LeaseExpired, StaleWrite
from streamrl.protocol.groups import GroupLease, SpentTokens, TakenBatch
from streamrl.replay import BufferSpec, JournalledBuffer, ReplayBuffer
from streamrl.replay.journal import FOLDER, journal_files
from streamrl.replay.replayed import CallClock, replay
from tests.replay.replay_world import HandClock, bad, check_world, good, picture, prompts

N, B = 2, 2
WORKERS = ("w0", "w1", "w2")
ROW_TOKENS = 3


class World:
    """A buffer, three workers and one or two learners. With a ``folder`` every call is journalled and the process may die."""

    def __init__(self, bound: int, strategy: str, folder: Path | None = None, retain: str | None = None, breaker_window: int = 1000) -> None:
        self.clock = HandClock()
        config = ReplayConfig(
            max_staleness=bound,
            max_off_policy_strategy=strategy,  # type: ignore[arg-type]
            wait_s=40,
            lease_s=20,
            breaker_window=breaker_window,
            breaker_cooldown_s=10,
            retain=retain,  # type: ignore[arg-type]
            retain_bytes=5 * 96 * 2 * (ROW_TOKENS + 4),  # about five groups
        )
        self.spec = BufferSpec(config, B, N)
        self.folder = folder
        self.calls: ReplayBuffer | JournalledBuffer = self._open()
        self.bound = bound
        self.next_prompt = 0
        self.leases: list[tuple[str, GroupLease]] = []
        self.batches: list[TakenBatch] = []
        self.trained: list[str] = []
        self.mark = 0
        self.ceiling = self.buffer.capacity_groups  # a rollback may exceed the capacity; from then on it only shrinks
        self.engine_version: dict[tuple[str, int], int] = {}
        self.ended = False

    def _open(self) -> ReplayBuffer | JournalledBuffer:
        if self.folder is None:
            return ReplayBuffer(self.spec.config, groups_per_step=B, n=N, clock=self.clock)
        return JournalledBuffer.open(self.folder / FOLDER, self.spec, self.clock)

    @property
    def buffer(self) -> ReplayBuffer:
        return self.calls.buffer if isinstance(self.calls, JournalledBuffer) else self.calls

    def close(self) -> None:
        if isinstance(self.calls, JournalledBuffer):
            self.calls.close_files()

    def admit(self) -> None:
        if not self.ended:
            slots = self.buffer.admission(3).slots
            self.calls.admit(prompts(slots, self.next_prompt))
            self.next_prompt += slots

    def lease(self, worker: str) -> None:
        for lease in self.calls.lease(worker, 2).leases:
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
        lost = (lease.seq_no + session) % 3  # the same in a repeat
        push = msgspec.structs.replace(push, lost_tokens=lost, written_tokens=ROW_TOKENS * len(push.keys) - session if push.keys else None)
        alive = self.buffer.table.groups.get(lease.uid)
        known = alive.sessions.get(session) if alive is not None and alive.attempt == lease.attempt else None
        if known is not None and (known.keys != push.keys or known.reason != push.reason):
            return  # a well-behaved worker pushes a session once
        fresh = alive is not None and alive.attempt == lease.attempt and alive.state == "running"
        try:
            assert self.calls.push(push) is (known is None)
            assert fresh or known is not None
        except StaleWrite:
            assert not fresh

    def spend(self, pick: int) -> None:
        """Tokens that no push tells of: of a validation, of a group that was taken away, of one that nobody knows any more."""
        uids = [None, "unknown", *(lease.uid for _, lease in self.leases)]
        assert self.calls.spent("w0", [SpentTokens(1 + pick % 5, uids[pick % len(uids)]), SpentTokens(1)]) == 2 + pick % 5

    def push_again(self, pick: int) -> None:
        """A session that was acknowledged comes once more: nothing changes."""
        pushed = [(group, session) for group in self.buffer.table.groups.values() if group.state != "pending" for session in group.sessions.values()]
        if pushed:
            before = picture(self.buffer)
            assert self.calls.push(pushed[pick % len(pushed)][1]) is False
            assert picture(self.buffer) == before

    def give_up(self, pick: int) -> None:
        """The disk takes no more rows of trained groups."""
        if self.trained:
            uid = self.trained[pick % len(self.trained)]
            assert self.calls.give_up([uid, "unknown"]) <= 1
            assert self.buffer.life.provisional.held(uid) is None

    def take(self, num_groups: int) -> None:
        try:
            batch = self.calls.take(num_groups)
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
            self.calls.abandon(batch.lease_id)
            with pytest.raises(LeaseExpired):
                self.calls.commit(batch.lease_id)
        elif how == "skip":
            self.calls.skip(batch.lease_id)
        else:
            stale = self.calls.check_bound(batch.lease_id)
            left = [uid for uid in batch.uids if uid not in stale]
            assert all(self.buffer.table.groups[uid].lag <= self.bound for uid in left)
            rejected = left[:1] if how == "reject" else []
            self.calls.commit(batch.lease_id, rejected, how != "quiet")  # quiet: of a step that makes no version
            self.trained += [uid for uid in left if uid not in rejected]

    def publish(self) -> None:
        if self.buffer.stats().trained_unpublished or self.buffer.spent_unpublished:
            self.calls.published(self.buffer.published_version + 1)

    def give_back(self, pick: int) -> None:
        if self.leases:
            worker, lease = self.leases[pick % len(self.leases)]
            self.calls.give_back(worker, [(lease.uid, lease.attempt)])

    def pass_time(self, seconds: float) -> None:
        self.clock.pass_s(seconds)
        self.calls.expire()

    def clear(self) -> None:
        self.calls.garbage_cleared(self.calls.collect_garbage())

    def restart(self) -> None:
        """Only the snapshot is left."""
        snapshot = self.calls.snapshot()
        if self.folder is None:
            self.calls = self._open()
        self.calls.restore(snapshot)
        self.calls.published(snapshot.published_version + 1)
        self.leases, self.batches, self.mark = [], [], snapshot.mark

    def crash(self) -> None:
        """The process dies between two calls, perhaps in the middle of writing a third one; the journal gives the very same state."""
        if self.folder is None:
            return
        before = picture(self.buffer)
        self.close()
        newest = journal_files(self.folder / FOLDER)[-1]
        assert picture(replay(newest, CallClock(self.clock)).buffer) == before
        self.clock.pass_s(1000)  # nobody's lease runs out meanwhile
        self.calls = self._open()

    def checkpoint(self) -> None:
        self.mark = self.calls.snapshot().mark
        self.calls.checkpointed(self.mark)

    def rollback(self, rng: random.Random) -> None:
        """The learner dies and falls back to its checkpoint; sometimes all else died too and the store lost some rows."""
        if self.buffer.closed:
            return
        self.calls.new_learner()
        self.batches = []
        if rng.random() < 0.5:
            self.calls.restarted()
            held = [key for group in self.buffer.table.in_state("ready") for key in group.keys()]
            self.calls.forget_missing([key for key in held if rng.random() < 0.2])
        assert self.calls.rollback(self.mark) == len(self.trained) - self.mark
        self.trained = self.trained[: self.mark]
        self.ceiling = max(self.ceiling, self.buffer.outstanding)

    def check(self) -> None:
        self.ceiling = check_world(self.buffer, self.ceiling)
        assert len(set(self.trained)) == len(self.trained) == self.buffer.stats().trained
        assert self.buffer.stats().lag_max <= self.bound

    def audit(self) -> None:
        """Books that know nothing of the buffer come to the same totals."""
        if self.folder is None:
            return
        report, stats = audit(self.folder), self.buffer.stats()
        assert report.closes, report.differences
        assert (report.groups.generated, report.groups.trained) == (stats.admitted, stats.trained)
        assert {reason: units.groups for reason, units in report.dropped.items() if units.groups} == stats.dropped
        assert (report.trajectories.generated, report.trajectories.trained) == (stats.trajectories_generated, stats.trajectories_trained)
        assert {reason: units.tokens for reason, units in report.dropped.items() if units.tokens} == stats.tokens_dropped
        places = {fate: count for fate, count in stats.token_fates.items() if count}
        assert report.policy_tokens == places | ({"in_flight": stats.tokens_in_flight} if stats.tokens_in_flight else {})
        assert report.groups.in_flight == len(self.buffer.table.groups) and report.lag_max == stats.lag_max


_EVENTS = {  # how often each happens
    "admit": 6,
    "lease": 8,
    "push": 30,
    "again": 2,
    "take": 8,
    "end": 8,
    "publish": 6,
    "give_back": 1,
    "die": 1,
    "time": 2,
    "clear": 6,
    "beat": 2,
    "restart": 0.15,
    "finish": 0.03,
    "crash": 2,
    "save": 1,
    "back": 0.5,
    "give_up": 0.5,
    "spend": 2,
}


def step(world: World, number: int) -> None:
    """One event chosen by ``number``."""
    rng = random.Random(number)
    kind = rng.choices(
        [*_EVENTS],
        [*_EVENTS.values()],
    )[0]
    pick, worker = rng.randrange(10**6), rng.choice(WORKERS)
    if kind == "admit":
        world.admit()
    elif kind == "lease":
        world.lease(worker)
    elif kind == "push":
        world.push(pick, rng.choices(["good", "bad", "fatal"], [16, 3, 1])[0])
    elif kind == "again":
        world.push_again(pick)
    elif kind == "give_up":
        world.give_up(pick)
    elif kind == "spend":
        world.spend(pick)
    elif kind == "take":
        world.take(rng.choice([1, 2, 2, 2, 3]))
    elif kind == "end":
        world.end_batch(rng.choices(["commit", "reject", "quiet", "skip", "abandon"], [10, 2, 2, 1, 2])[0])
    elif kind == "publish":
        world.publish()
    elif kind == "give_back":
        world.give_back(pick)
    elif kind == "die":
        world.calls.release_worker(worker)
    elif kind == "time":
        world.pass_time(rng.choice([1, 15, 45]))
    elif kind == "clear":
        world.clear()
    elif kind == "beat":
        world.calls.heartbeat(worker)
    elif kind == "restart":
        world.restart()
    elif kind == "crash":
        world.crash()
    elif kind == "save":
        world.checkpoint()
    elif kind == "back":
        world.rollback(rng)
    elif kind == "finish":
        world.calls.end_of_prompts()
        world.ended = True

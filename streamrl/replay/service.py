"""The async face of the replay buffer: the ``Replay`` Protocol with waits that have deadlines. Nothing here decides about groups.

Waiters sleep on a topic and are woken by the call that changes something for them; nobody polls. All state lives on one event loop and no
call awaits between reading and changing it, so there is no lock. Freed rows are cleared from the store by one background task.

With a ``JournalledBuffer`` the calls survive this process; nothing else changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from streamrl.errors import Closed, LeaseExpired
from streamrl.protocol.groups import AdmissionReply, Heartbeat, LeaseReply, ReplaySnapshot, ReplayStats, SessionPush, SpentTokens, TakenBatch
from streamrl.protocol.health import ReplayFacts
from streamrl.protocol.topic import Topic
from streamrl.protocol.trajectory import Prompt
from streamrl.replay import report
from streamrl.replay.buffer import ReplayBuffer
from streamrl.replay.journalled import JournalledBuffer
from streamrl.replay.keeping import Keeper, Spill
from streamrl.replay.restart import held_keys
from streamrl.replay.zero_variance import BARREN_BATCHES, BARREN_SHARE

log = logging.getLogger(__name__)

Clear = Callable[[list[str]], Awaitable[Any]]
Missing = Callable[[list[str]], Awaitable[list[str]]]
CLEAR_TRIES = 5
CLEAR_TIMEOUT_S = 30.0  # one call to the store
CLOSE_TIMEOUT_S = 10.0  # for the last clearing
IDLE_TIMER_S = 60.0  # longest sleep of the timer loop when no deadline is known


class ReplayService:
    """Implements ``streamrl.protocol.interfaces.Replay``. ``clear(keys)`` frees rows in the store; without it freed keys are forgotten.
    ``missing(keys)`` names those that the store does not hold, asked at a restart; without it all of them count as lost. ``spill(uids)`` moves the
    rows of trained groups to disk, where they wait for a checkpoint; without it they wait in the store.

    Run ``run_timers()`` as a task beside it: it expires leases and late groups even when nobody calls.
    """

    def __init__(self, buffer: ReplayBuffer | JournalledBuffer, clear: Clear | None = None, missing: Missing | None = None, spill: Spill | None = None) -> None:
        self._calls = buffer
        self._clear = clear
        self._missing = missing
        self._keeper = None if spill is None else Keeper(spill, self._still_kept, self._give_up)
        self._barren: set[str] = set()  # environments that were warned of
        self._admission, self._lease, self._take, self._timer = Topic(), Topic(), Topic(), Topic()
        self._releases: Counter[str] = Counter()  # by worker: how often it was declared dead
        self._learners = 0  # how often another one took over
        self._needed = 0  # groups of the newest take
        self._seen_changes = self.buffer.table.changes
        self._timer_due = 0.0  # clock time at which the timer loop will look by itself
        self._to_clear: list[list[str]] = []
        self._cleaner: asyncio.Task[None] | None = None

    @property
    def buffer(self) -> ReplayBuffer:
        """For reading only."""
        return self._calls.buffer if isinstance(self._calls, JournalledBuffer) else self._calls

    def quarantined(self) -> list[str]:
        """Prompts that failed too often, as ``source/index``."""
        return self.buffer.life.quarantine.names()

    # ---- the prompt feeder

    async def admission(self, max_groups: int, wait_s: float) -> AdmissionReply:
        deadline, waited_for = _loop_time() + wait_s, None
        while True:
            self._expire()
            reply = self._calls.admission(max_groups)
            waited_for = waited_for or reply.reason
            if reply.slots or reply.closed or not await self._admission.wait_until(deadline):
                return msgspec.structs.replace(reply, reason=waited_for)

    async def admit(self, prompts: list[Prompt]) -> list[int]:
        result = self._calls.admit(prompts)
        self._after()
        return result

    async def end_of_prompts(self) -> None:
        self._calls.end_of_prompts()
        self._after()

    # ---- rollout actors

    async def lease(self, worker: str, max_groups: int, wait_s: float) -> LeaseReply:
        deadline, releases = _loop_time() + wait_s, self._releases[worker]
        while self._releases[worker] == releases:  # a call outlives its caller: what a dead worker waited for must not be leased to its successor's name
            self._expire()
            reply = self._calls.lease(worker, max_groups)
            self._after()
            if reply.leases or reply.closed or not await self._lease.wait_until(deadline):
                return reply
        return LeaseReply([])

    async def push(self, session: SessionPush) -> bool:
        try:
            return self._calls.push(session)
        finally:  # a refused push may leave rows to clear
            self._after()
            self._warn_of_barren_data()

    async def heartbeat(self, worker: str) -> Heartbeat:
        result = self._calls.heartbeat(worker)
        self._after()
        return result

    async def give_back(self, worker: str, leases: list[tuple[str, int]]) -> None:
        self._calls.give_back(worker, leases)
        self._after()

    async def spent(self, worker: str, spent: list[SpentTokens]) -> int:
        return self._calls.spent(worker, spent)

    async def release_worker(self, worker: str) -> int:
        self._releases[worker] += 1
        result = self._calls.release_worker(worker)
        self._after()
        return result

    # ---- the trainer

    async def take(self, num_groups: int, wait_s: float) -> TakenBatch:
        deadline, learner = _loop_time() + wait_s, self._learners
        self._needed = num_groups
        while self._learners == learner:  # a call outlives its caller: a batch that a dead trainer waited for would stay leased for ever
            self._expire()
            try:
                batch = self._calls.take(num_groups)
            except Closed:
                self._after()  # what was left has ended just now
                raise
            self._after()
            if batch is not None:
                return batch
            if not await self._take.wait_until(deadline):
                raise self.buffer.take_timeout(num_groups, wait_s)
        raise LeaseExpired("batches go to the newest trainer, got a take that waited since before it; the caller was replaced and must end")

    async def check_bound(self, lease_id: int) -> list[str]:
        result = self._calls.check_bound(lease_id)
        self._after()
        return result

    async def commit(self, lease_id: int, rejected: list[str], publishes: bool = True) -> None:
        uids = self.buffer.learners.uids(lease_id)
        self._calls.commit(lease_id, rejected, publishes)
        if self._keeper is not None and not publishes:
            self._keeper.keep(uids)
        self._after()

    async def skip(self, lease_id: int) -> None:
        self._calls.skip(lease_id)
        self._after()

    async def abandon(self, lease_id: int) -> None:
        self._calls.abandon(lease_id)
        self._after()

    async def published(self, version: int) -> None:
        kept = self.buffer.life.provisional.kept_unpublished()
        self._calls.published(version)
        if self._keeper is not None:
            self._keeper.keep(kept)
        self._after()

    async def snapshot(self) -> ReplaySnapshot:
        return self._calls.snapshot()

    async def new_learner(self) -> int:
        self._learners += 1
        self._take.wake()
        result = self._calls.new_learner()
        self._after()
        return result

    async def checkpointed(self, mark: int) -> None:
        self._calls.checkpointed(mark)
        self._after()

    async def rollback(self, mark: int | None, version: int | None) -> int:
        result = self._calls.rollback(mark, version)
        self._after()
        return result

    async def restore(self, snapshot: ReplaySnapshot) -> None:
        """The whole run was started again. Goes on from the journal as far as its groups fit the checkpoint; else from the snapshot alone."""
        calls = self._calls
        if isinstance(calls, JournalledBuffer) and calls.went_on:
            if not self.buffer.closed and self.buffer.life.provisional.can_take_back(snapshot.mark):
                await self._continue(calls, snapshot.mark)
                return
            log.warning("the journal ended in order or goes on from a later checkpoint: untrained groups of the snapshot are generated again")
        calls.restore(snapshot)
        self._after()

    async def _continue(self, calls: JournalledBuffer, mark: int) -> None:
        calls.new_learner()
        calls.restarted()
        finished = {group.uid for group in self.buffer.table.in_state("ready")}
        keys = held_keys(self.buffer)
        lost = calls.forget_missing(await self._missing(keys) if self._missing is not None else keys)
        back = calls.rollback(mark)
        kept = len(finished.intersection(group.uid for group in self.buffer.table.in_state("ready")))
        log.info(
            "replay goes on: %d groups lost rows, %d groups trained after the checkpoint come back; of %d finished ones %d are kept, the others would be "
            "above max_staleness=%d when their turn comes and are generated again",
            lost,
            back,
            len(finished),
            kept,
            self.buffer.config.max_staleness,
        )
        self._after()

    async def stats(self) -> ReplayStats:
        return self._calls.stats()

    def facts(self) -> ReplayFacts:
        """What a diagnosis reads."""
        return report.facts(self.buffer, self._needed)

    async def close(self) -> None:
        """Ends all waits, drops what nobody trains, and gives the store a moment to free its rows."""
        self._calls.close()
        self._after()
        self._timer.wake()
        if self._keeper is not None:
            await self._keeper.close()
        if self._cleaner is not None:
            await asyncio.wait([self._cleaner], timeout=CLOSE_TIMEOUT_S)

    # ---- time

    async def run_timers(self) -> None:
        """Consumes: nothing. Produces: expired leases, dropped late groups, ended cool-downs. Waits for: the next deadline, at most a minute.
        Unblocked by: a change that brings an earlier deadline, or the close."""
        if self._keeper is not None:
            self._keeper.keep(self.buffer.life.provisional.kept_published())  # of an earlier life, which may have ended while it moved them
        while not self.buffer.closed:
            self._expire()
            now = self.buffer.clock()
            due = self.buffer.next_deadline()
            self._timer_due = now + IDLE_TIMER_S if due is None else min(due, now + IDLE_TIMER_S)
            if not await self._timer.wait_until(_loop_time() + max(0.0, self._timer_due - now)):
                self._wake_all()  # a cool-down ends without a change of state

    def _expire(self) -> None:
        due = self.buffer.next_deadline()
        if due is not None and due <= self.buffer.clock():
            self._calls.expire()
            self._after()

    def _after(self) -> None:
        """After every call that may have changed something: wake who can go on, hand freed rows to the cleaner."""
        self._collect()
        if self.buffer.table.changes != self._seen_changes or self.buffer.closed:
            self._seen_changes = self.buffer.table.changes
            self._wake_all()
            due = self.buffer.next_deadline()
            if self._timer and due is not None and due < self._timer_due:
                self._timer.wake()

    def _wake_all(self) -> None:
        buffer = self.buffer
        if self._admission and (buffer.end_of_data or buffer.outstanding < buffer.capacity_groups):
            self._admission.wake()
        if self._lease and (buffer.end_of_data or len(buffer.table.pending)):
            self._lease.wake()
        self._take.wake()

    # ---- kept rows

    def _still_kept(self, uids: list[str]) -> list[str]:
        held = self.buffer.life.provisional.held
        return [uid for uid in uids if held(uid) is not None]

    def _give_up(self, uids: list[str]) -> None:
        self._calls.give_up(uids)
        self._after()

    def _warn_of_barren_data(self) -> None:
        """Once, until the environment has had a better batch."""
        barren = set(self.buffer.life.signal.barren())
        for env in sorted(barren - self._barren):
            share = self.buffer.life.signal.shares[env]
            log.warning(
                "at most %.0f %% of the groups of %s should have no signal, got more in %d batches in a row (%.1f %% in the last one); its prompts are "
                "too easy or too hard for the model, or its scorer gives every answer the same score",
                100 * BARREN_SHARE,
                env,
                BARREN_BATCHES,
                100 * share,
            )
        self._barren = barren

    # ---- freed rows

    def _collect(self) -> None:
        keys = self._calls.collect_garbage()
        if not keys:
            return
        if self._clear is None:
            self._calls.garbage_cleared(keys)
            return
        self._to_clear.append(keys)
        if self._cleaner is None or self._cleaner.done():
            self._cleaner = asyncio.get_running_loop().create_task(self._clean(self._clear), name="replay-clear")

    async def _clean(self, clear: Clear) -> None:
        """Clears batch after batch; groups that wait for it are leased again even if the store can't be reached (their rows get replaced)."""
        while self._to_clear:
            keys = [key for batch in self._to_clear for key in batch]
            self._to_clear.clear()
            await self._clear_with_retries(clear, keys)
            self._calls.garbage_cleared(keys)
            self._after()

    async def _clear_with_retries(self, clear: Clear, keys: list[str]) -> None:
        for attempt in range(CLEAR_TRIES):
            try:
                async with asyncio.timeout(CLEAR_TIMEOUT_S):
                    await clear(keys)
                return
            except Exception:
                log.warning("clearing %d rows failed (try %d of %d)", len(keys), attempt + 1, CLEAR_TRIES, exc_info=True)
                await asyncio.sleep(0.1 * 2**attempt)
        log.error("%d rows stay in the store: it refused to clear them %d times", len(keys), CLEAR_TRIES)


def _loop_time() -> float:
    return asyncio.get_running_loop().time()

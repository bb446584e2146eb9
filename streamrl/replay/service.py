"""The async face of the replay buffer: the ``Replay`` Protocol with waits that have deadlines. Nothing here decides about groups.

Waiters sleep on a topic and are woken by the call that changes something for them; nobody polls. All state lives on one event loop and no
call awaits between reading and changing it, so there is no lock. Freed rows are cleared from the store by one background task.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from streamrl.errors import Closed
from streamrl.protocol.groups import AdmissionReply, Heartbeat, LeaseReply, ReplaySnapshot, ReplayStats, SessionPush, TakenBatch
from streamrl.protocol.topic import Topic
from streamrl.protocol.trajectory import Prompt
from streamrl.replay.buffer import ReplayBuffer

log = logging.getLogger(__name__)

Clear = Callable[[list[str]], Awaitable[Any]]
CLEAR_TRIES = 5
CLEAR_TIMEOUT_S = 30.0  # one call to the store
CLOSE_TIMEOUT_S = 10.0  # for the last clearing
IDLE_TIMER_S = 60.0  # longest sleep of the timer loop when no deadline is known


class ReplayService:
    """Implements ``streamrl.protocol.interfaces.Replay``. ``clear(keys)`` frees rows in the store; without it freed keys are forgotten.

    Run ``run_timers()`` as a task beside it: it expires leases and late groups even when nobody calls.
    """

    def __init__(self, buffer: ReplayBuffer, clear: Clear | None = None) -> None:
        self.buffer = buffer
        self._clear = clear
        self._admission, self._lease, self._take, self._timer = Topic(), Topic(), Topic(), Topic()
        self._releases: Counter[str] = Counter()  # by worker: how often it was declared dead
        self._seen_changes = buffer.table.changes
        self._timer_due = 0.0  # clock time at which the timer loop will look by itself
        self._to_clear: list[list[str]] = []
        self._cleaner: asyncio.Task[None] | None = None

    # ---- the prompt feeder

    async def admission(self, max_groups: int, wait_s: float) -> AdmissionReply:
        deadline = _loop_time() + wait_s
        while True:
            self._expire()
            reply = self.buffer.admission(max_groups)
            if reply.slots or reply.closed or not await self._admission.wait_until(deadline):
                return reply

    async def admit(self, prompts: list[Prompt]) -> list[int]:
        result = self.buffer.admit(prompts)
        self._after()
        return result

    async def end_of_prompts(self) -> None:
        self.buffer.end_of_prompts()
        self._after()

    # ---- rollout actors

    async def lease(self, worker: str, max_groups: int, wait_s: float) -> LeaseReply:
        deadline, releases = _loop_time() + wait_s, self._releases[worker]
        while self._releases[worker] == releases:  # a call outlives its caller: what a dead worker waited for must not be leased to its successor's name
            self._expire()
            reply = self.buffer.lease(worker, max_groups)
            self._after()
            if reply.leases or reply.closed or not await self._lease.wait_until(deadline):
                return reply
        return LeaseReply([])

    async def push(self, session: SessionPush) -> bool:
        try:
            return self.buffer.push(session)
        finally:  # a refused push may leave rows to clear
            self._after()

    async def heartbeat(self, worker: str) -> Heartbeat:
        result = self.buffer.heartbeat(worker)
        self._after()
        return result

    async def give_back(self, worker: str, leases: list[tuple[str, int]]) -> None:
        self.buffer.give_back(worker, leases)
        self._after()

    async def release_worker(self, worker: str) -> int:
        self._releases[worker] += 1
        result = self.buffer.release_worker(worker)
        self._after()
        return result

    # ---- the trainer

    async def take(self, num_groups: int, wait_s: float) -> TakenBatch:
        deadline = _loop_time() + wait_s
        while True:
            self._expire()
            try:
                batch = self.buffer.take(num_groups)
            except Closed:
                self._after()  # what was left has ended just now
                raise
            self._after()
            if batch is not None:
                return batch
            if not await self._take.wait_until(deadline):
                raise self.buffer.take_timeout(num_groups, wait_s)

    async def check_bound(self, lease_id: int) -> list[str]:
        result = self.buffer.check_bound(lease_id)
        self._after()
        return result

    async def commit(self, lease_id: int, rejected: list[str]) -> None:
        self.buffer.commit(lease_id, rejected)
        self._after()

    async def skip(self, lease_id: int) -> None:
        self.buffer.skip(lease_id)
        self._after()

    async def abandon(self, lease_id: int) -> None:
        self.buffer.abandon(lease_id)
        self._after()

    async def published(self, version: int) -> None:
        self.buffer.published(version)
        self._after()

    async def snapshot(self) -> ReplaySnapshot:
        return self.buffer.snapshot()

    async def restore(self, snapshot: ReplaySnapshot) -> None:
        self.buffer.restore(snapshot)
        self._after()

    async def stats(self) -> ReplayStats:
        return self.buffer.stats()

    async def close(self) -> None:
        """Ends all waits, drops what nobody trains, and gives the store a moment to free its rows."""
        self.buffer.close()
        self._after()
        self._timer.wake()
        if self._cleaner is not None:
            await asyncio.wait([self._cleaner], timeout=CLOSE_TIMEOUT_S)

    # ---- time

    async def run_timers(self) -> None:
        """Consumes: nothing. Produces: expired leases, dropped late groups, ended cool-downs. Waits for: the next deadline, at most a minute.
        Unblocked by: a change that brings an earlier deadline, or the close."""
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
            self.buffer.expire()
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

    # ---- freed rows

    def _collect(self) -> None:
        keys = self.buffer.collect_garbage()
        if not keys:
            return
        if self._clear is None:
            self.buffer.garbage_cleared(keys)
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
            self.buffer.garbage_cleared(keys)
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

"""One greedy session per group, for estimators that compare with the greedy answer: made when the first session asks, shared by the others.

Guarantees: the sessions of one (uid, attempt) that run side by side share one greedy session; it ends when none of them is left; nothing of it
stays afterwards. It is no row and no session of the group. A session that is run again after all its siblings have ended gets a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from streamrl.protocol.groups import GroupLease


@dataclass
class GreedyScore:
    """The score of one group's greedy session, under way or known."""

    task: asyncio.Task[float]
    users: int = 0

    async def value(self) -> float:
        """What made the greedy session fail is raised in every session that asks. A session that is cancelled here leaves it to the others."""
        return await asyncio.shield(self.task)


class GreedyScores:
    """``run`` makes one greedy session of a lease and returns its score."""

    def __init__(self, run: Callable[[GroupLease], Awaitable[float]]) -> None:
        self._run = run
        self._shared: dict[tuple[str, int], GreedyScore] = {}

    @asynccontextmanager
    async def of(self, lease: GroupLease) -> AsyncIterator[GreedyScore]:
        """Held by a session while it runs."""
        key = lease.uid, lease.attempt
        shared = self._shared.get(key)
        if shared is None or (shared.task.done() and shared.task.exception() is not None):  # a retried session tries again
            shared = self._shared[key] = GreedyScore(asyncio.create_task(self._score(lease), name=f"greedy {lease.uid}"))
            shared.task.add_done_callback(_look_at)
        shared.users += 1
        try:
            yield shared
        finally:
            shared.users -= 1
            if not shared.users:
                shared.task.cancel()
                if self._shared.get(key) is shared:
                    del self._shared[key]

    async def _score(self, lease: GroupLease) -> float:
        return await self._run(lease)


def _look_at(task: asyncio.Task[float]) -> None:
    """Its error belongs to those who await it; when they have all ended first, to nobody."""
    if not task.cancelled():
        task.exception()

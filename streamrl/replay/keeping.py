"""Rows of trained groups on their way to disk, where they wait for the checkpoint that contains their update.

Guarantees: nobody waits for it, neither a publication nor a step; rows that can't be moved are freed instead, so that what is only kept for a
rollback never fills the store. A group that a rollback brought back, or a checkpoint made final meanwhile, is left alone: whether its rows are still
kept is asked before the move and once more before they are given up. Which rows are kept at all, and how many, is ``provisional.py``'s business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

log = logging.getLogger(__name__)

Spill = Callable[[list[str]], Awaitable[Any]]
SPILL_TIMEOUT_S = 120.0  # one call to the store: the groups of a few publications
CLOSE_TIMEOUT_S = 10.0  # for the move under way


class Keeper:
    """One background task moves batch after batch. ``still_kept(uids)`` leaves out those that need no move any more."""

    def __init__(self, spill: Spill, still_kept: Callable[[list[str]], list[str]], give_up: Callable[[list[str]], None]) -> None:
        self._spill = spill
        self._still_kept = still_kept
        self._give_up = give_up
        self._waiting: list[str] = []
        self._task: asyncio.Task[None] | None = None
        self._failing = False  # the last move failed, which was said

    def keep(self, uids: list[str]) -> None:
        """Move the rows of these groups soon."""
        self._waiting += uids
        if self._waiting and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._move_all(), name="replay-spill")

    async def close(self) -> None:
        """Nothing more is moved."""
        self._waiting.clear()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)

    async def _move_all(self) -> None:
        while self._waiting:
            uids, self._waiting = self._still_kept(self._waiting), []
            if not uids:
                continue
            try:
                async with asyncio.timeout(SPILL_TIMEOUT_S):
                    await self._spill(uids)
                self._failing = False
            except Exception as error:  # whatever it was, the rows must not stay
                self._say(error, len(uids))
                self._give_up(self._still_kept(uids))

    def _say(self, error: Exception, groups: int) -> None:
        """Once, until a move succeeds again."""
        if not self._failing:
            log.warning(
                "rows of trained groups are kept on disk until the next checkpoint, got %s for %d groups; their memory is freed, and if the learner falls "
                "back they are generated again",
                error,
                groups,
            )
        self._failing = True

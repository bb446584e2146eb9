"""How many calls of one scorer run at once, and when it's no use to wait for a turn.

The wait for a slot isn't part of a call's own limit, and is shown as what it is. It ends because every call does, and, when the scorer hangs, because
nobody queues behind a row of timeouts: who waited then fails at once, so that a run names its scorer after a few limits and not after one limit per answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from streamrl.errors import RewardError, WaitTimeout
from streamrl.protocol.waits import queued

MIN_PATIENCE = 4  # timeouts in a row; fewer may be chance, for example four answers that a parser never gets through


class Slots:
    """``async with slots.one(): call`` with at most ``size`` calls inside. A call that finds a free slot is always tried, whatever went before. ``on``: whom
    waiting calls are shown to wait for; empty: the scorer whose edge is around them."""

    def __init__(self, size: int, name: str, on: str = "") -> None:
        self._free = asyncio.Semaphore(size)
        self._name = name
        self._on = on
        self._patience = max(MIN_PATIENCE, 2 * size)
        self._late = 0  # timeouts since the last call that ended in time

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """An end by WaitTimeout, or by a RewardError that one caused, is a timeout. RewardError for a call that waited while too many came in a row."""
        waited = self._free.locked()
        with queued(self._on):
            await self._free.acquire()
        try:
            if waited and self._late >= self._patience:
                raise RewardError(
                    f"calls of {self._name} end in time, got {self._late} timeouts in a row, so none waits for its turn; "
                    "look at what the scorer waits for, or raise reward.timeout_s"
                )
            try:
                yield
            except Exception as error:
                self._late = self._late + 1 if isinstance(error.__cause__ or error, WaitTimeout) else 0
                raise
            self._late = 0
        finally:
            self._free.release()

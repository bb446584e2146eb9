"""Every wait of a process: what it waits for, whom it waits for, since when, until when.

The table is what ``waits.json`` of a run shows. It records; the deadline itself is kept by the call that waits, or by ``limit``.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from streamrl.errors import WaitTimeout

T = TypeVar("T")


class Wait(msgspec.Struct, frozen=True):
    """One row: ``waiter`` waits for ``what`` of ``on`` since ``since`` (unix time) for at most ``limit_s`` seconds."""

    waiter: str
    what: str
    on: str
    since: float
    limit_s: float


class WaitTable:
    """The open waits of one process."""

    def __init__(self, waiter: str) -> None:
        self._waiter = waiter
        self._open: dict[int, Wait] = {}
        self._ids = itertools.count()

    @contextmanager
    def waiting(self, what: str, on: str, limit_s: float) -> Iterator[None]:
        """Show a wait for as long as the block runs. The callee keeps the deadline."""
        ticket = next(self._ids)
        self._open[ticket] = Wait(self._waiter, what, on, time.time(), limit_s)
        try:
            yield
        finally:
            del self._open[ticket]

    async def limit(self, awaitable: Awaitable[T], what: str, on: str, limit_s: float) -> T:
        """Await under a deadline that this table keeps; WaitTimeout names the wait."""
        deadline = asyncio.timeout(limit_s)  # not wait_for: in Python 3.11 that one can swallow a cancellation, and its task then runs on
        with self.waiting(what, on, limit_s):
            try:
                async with deadline:
                    return await awaitable
            except TimeoutError:
                if not deadline.expired():
                    raise
                raise WaitTimeout(f"{self._waiter} waited {limit_s:g} s for {what} of {on}, which is its limit; look at {on}, or raise the limit") from None

    def rows(self) -> list[Wait]:
        """Open waits, oldest first."""
        return sorted(self._open.values(), key=lambda wait: wait.since)

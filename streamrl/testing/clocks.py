"""Clocks for tests: time passes without sleeping. Both are ``streamrl.protocol.interfaces.Clock``."""

from __future__ import annotations

import asyncio

TURNS = 50  # turns of the event loop that a jump leaves to the other tasks


class JumpingClock:
    """Sleeping moves the time on at once, after other tasks had a few turns."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s

    async def sleep(self, seconds: float) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        self.time_s += seconds


class StepClock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self.time_s

    async def sleep(self, seconds: float) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.time_s + seconds, waiting))
        await waiting

    async def advance(self, seconds: float) -> None:
        self.time_s += seconds
        due = [waiting for when, waiting in self._sleepers if when <= self.time_s]
        self._sleepers = [(when, waiting) for when, waiting in self._sleepers if when > self.time_s]
        for waiting in due:
            if not waiting.done():
                waiting.set_result(None)
        for _ in range(5):
            await asyncio.sleep(0)

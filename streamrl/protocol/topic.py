"""Waiting without polling: who needs a change sleeps on a topic, who makes the change wakes it. One event loop; no lock."""

from __future__ import annotations

import asyncio


class Topic:
    """Waiters for one kind of change."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def __bool__(self) -> bool:
        return bool(self._waiters)

    def wake(self) -> None:
        """All who wait now look again, in the order in which they came."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_until(self, deadline: float) -> bool:
        """False when ``deadline`` (loop time) passed first."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
            return True
        except TimeoutError:
            return False
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

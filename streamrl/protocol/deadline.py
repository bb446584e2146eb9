"""A deadline that holds against code which swallows its cancellation. Time comes from the injected clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from streamrl.errors import WaitTimeout
from streamrl.protocol.interfaces import Clock

T = TypeVar("T")


async def within(awaitable: Awaitable[T], seconds: float, what: str, clock: Clock) -> T:
    """The result of ``awaitable``, or WaitTimeout after ``seconds``. An overdue task is cancelled and left behind, not waited for:
    ``asyncio.wait_for`` would wait as long as the task likes to ignore its cancellation. When the caller is cancelled, so is the task.
    """
    task = asyncio.ensure_future(awaitable)
    timer = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait({task, timer}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise WaitTimeout(f"{what} ends within {seconds:g} s, got no end; look at what it waits for, or raise the limit")
    finally:
        timer.cancel()
        if not task.done():
            task.add_done_callback(_look_at)
            task.cancel()


def _look_at(task: asyncio.Future) -> None:
    """Fetch the outcome of a task that nobody awaits any more, so that asyncio does not report it as forgotten."""
    if not task.cancelled():
        task.exception()

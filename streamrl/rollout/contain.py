"""Keeps what user code raises inside its session. In a task of its own, SystemExit would end the event loop, and a CancelledError that nobody asked for
would look like a cancellation from outside: the session would be gone without an outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def contained(awaitable: Awaitable[T]) -> T:
    """The result of user code; whatever is no ordinary exception becomes a RuntimeError. A cancellation of the task itself passes."""
    try:
        return await awaitable
    except (Exception, GeneratorExit):
        raise
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("user code cancelled itself") from None
    except BaseException as error:
        raise RuntimeError(f"user code raised {type(error).__name__}") from None


def words(error: BaseException) -> str:
    """The message of an error of user code, also of one that can't even say it."""
    try:
        return str(error)
    except BaseException:
        return "no message: its __str__ raises"

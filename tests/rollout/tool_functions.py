"""Tools for the tests of the tool agent."""

import asyncio

from streamrl.rollout.tools import tool


@tool
def add(a: int, b: int) -> str:
    """Adds.

    Args:
        a: First.
        b: Second.
    """
    return str(a + b)


@tool
async def slow(seconds: float) -> tuple[str, float]:
    """Sleeps, then answers with its time and a reward.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return f"slept {seconds}", 0.5


@tool
def broken() -> str:
    """Raises."""
    raise OSError("no file /etc/secret/path")


@tool
def long(size: int) -> str:
    """Answers at length.

    Args:
        size: Characters.
    """
    return "0123456789" * (size // 10)


@tool
def say(text: str) -> str:
    """Says it.

    Args:
        text: What.
    """
    return text

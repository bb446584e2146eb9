"""Work that goes on beside the steps of training."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Aside:
    """At most one task at a time. Its error is raised by whoever looks, or waits for its end."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None

    async def begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start ``work`` when what was begun before has ended."""
        try:
            await self.ended()
        except BaseException:
            work.close()
            raise
        self.task = asyncio.create_task(work, name=name)

    def look(self) -> None:
        """Raise its error if it has ended badly."""
        if self.task is not None and self.task.done():
            task, self.task = self.task, None
            task.result()

    async def ended(self) -> None:
        if self.task is not None:
            await asyncio.wait({self.task})
            self.look()

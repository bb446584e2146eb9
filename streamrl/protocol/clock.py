"""The machine's own clock, behind the ``Clock`` Protocol."""

from __future__ import annotations

import asyncio
import time


class SystemClock:
    """Monotonic time and real sleeping."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

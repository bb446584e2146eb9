"""``limited``: for scorers that take only so many calls at once, or so many requests or tokens a minute.

``reward.limited`` holds for the whole run; each rollout actor keeps to its share. Waiting for a turn is not part of ``reward.timeout_s``.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from streamrl.protocol.answer import Answer
from streamrl.protocol.interfaces import Clock
from streamrl.protocol.waits import TURN, queued
from streamrl.rewards.managers.base import RewardManager
from streamrl.rewards.slots import Slots

LIMITED = "scorer reward.limited"  # whom its waits are shown to be for


class Pace:
    """At most ``per_minute`` units in any minute, begun evenly: n units keep the next comer waiting for n / per_minute minutes. ``key``: the limit."""

    def __init__(self, per_minute: float, clock: Clock, key: str = "") -> None:
        self._seconds_per_unit = 60 / per_minute
        self._clock = clock
        self._key = key
        self._free_at = 0.0

    async def wait(self, units: int) -> None:
        now = self._clock.now()
        start = max(now, self._free_at)
        self._free_at = start + units * self._seconds_per_unit
        if start > now:
            with queued(LIMITED, f"{TURN} ({self._key})", start - now):
                await self._clock.sleep(start - now)


class LimitedManager(RewardManager):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        limits, actors = self.settings.reward.limited, self.settings.num_actors
        self._slots = Slots(limits.max_concurrency // actors, "the run's scorers", LIMITED) if limits.max_concurrency else None
        self._requests = Pace(limits.max_requests_per_minute / actors, self.clock, "max_requests_per_minute") if limits.max_requests_per_minute else None
        self._tokens = Pace(limits.max_tokens_per_minute / actors, self.clock, "max_tokens_per_minute") if limits.max_tokens_per_minute else None

    async def ask(self, answer: Answer) -> tuple[float, dict[str, Any]]:
        async with self._slots.one() if self._slots else nullcontext():
            if self._requests is not None:
                await self._requests.wait(1)
            if self._tokens is not None:
                await self._tokens.wait(answer.num_prompt_tokens + answer.num_tokens)
            return await super().ask(answer)

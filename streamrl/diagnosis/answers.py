"""What the driver hears of its actors: their newest health, when it was heard, and how far their clocks are from its own.

    {"time": 171.0, "actors": {"rollout-0": {...}, "learner-0": null}, "heard": {"learner-0": {"time": 122.0, "offset_s": 0.0, "last": {...}}}, "stall_s": 300}

``actors`` holds the answers of this second, null for who gave none; ``heard`` tells when each last answered and, of a silent one, what it said then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from streamrl.protocol.health import Health


class Heard(msgspec.Struct, frozen=True):
    """One actor. ``time``: the driver's clock at the newest answer, or at the first question if there was none."""

    time: float
    pid: int = 0
    offset_s: float = 0.0  # how far the actor's clock is ahead of the driver's
    drift_s: float = 0.0  # how far the clock that its leases go by has run ahead of the driver's since the first answer
    host: str = ""
    last: Health | None = None  # of a silent one


class Table(msgspec.Struct, frozen=True):
    """``waits.json``."""

    time: float
    actors: dict[str, Health | None] = {}
    heard: dict[str, Heard] = {}
    stall_s: float = 300.0


class _Known(msgspec.Struct):
    time: float
    last: Health | None = None
    offset_s: float = 0.0
    first_clock: float = 0.0  # the lease clock minus the driver's monotonic one, at the first answer of this process
    drift_s: float = 0.0


class Answers:
    """The driver's memory of what it heard."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._known: dict[str, _Known] = {}
        self._table = Table(time.time())

    def take(self, answers: Mapping[str, Health | None], asked: float, hosts: Mapping[str, str] | None = None) -> Table:
        """The answers to one round of questions, put at ``asked`` (unix time). Actors that are left out are forgotten."""
        now = time.time()
        self._known = {name: self._known.get(name, _Known(now)) for name in answers}
        for name, health in answers.items():
            if health is not None:
                self._hear(self._known[name], health, asked, now)
        heard = {
            name: Heard(
                known.time,
                0 if known.last is None else known.last.pid,
                known.offset_s,
                known.drift_s,
                (hosts or {}).get(name, ""),
                known.last if answers[name] is None else None,
            )
            for name, known in self._known.items()
        }
        return Table(now, dict(answers), heard, self._stall_s)

    def _hear(self, known: _Known, health: Health, asked: float, now: float) -> None:
        if health.time:
            known.offset_s = 0.0 if asked <= health.time <= now else health.time - (asked if health.time < asked else now)
        if health.replay is not None:
            ahead = health.replay.clock - time.monotonic()
            if known.last is None or known.last.pid != health.pid or known.last.replay is None:
                known.first_clock = ahead
            known.drift_s = ahead - known.first_clock
        known.time, known.last = now, health

"""Where an actor's time goes: one counter over states that adds up to wall time, whatever runs side by side.

An actor runs many things at once (sixty sessions generate, one is being scored, a loop waits for a lease). Each second is given to the
most telling of the states entered at that moment: work that stops generation first, then work, then waits; ``idle`` when none is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

STATES: tuple[str, ...] = (  # from the most to the least telling
    "weight_sync",
    "checkpoint",
    "forward_backward",
    "optimizer",
    "publish",
    "generate",
    "tool",
    "reward",
    "wait_data",
    "wait_admission",
    "idle",
)


class StateClock(Collector):
    """Seconds by state since construction. Thread-safe; entering and leaving cost about a microsecond."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._entered = dict.fromkeys(STATES, 0)  # how many blocks are inside each state
        self._seconds = dict.fromkeys(STATES, 0.0)
        self._current = "idle"
        self._since = now()

    @contextmanager
    def state(self, name: str) -> Iterator[None]:
        """The block is in state ``name``."""
        self._shift(name, 1)
        try:
            yield
        finally:
            self._shift(name, -1)

    def seconds(self) -> dict[str, float]:
        """Seconds by state up to now."""
        with self._lock:
            self._settle()
            return dict(self._seconds)

    def _shift(self, name: str, step: int) -> None:
        with self._lock:
            self._settle()
            self._entered[name] += step
            self._current = next((state for state in STATES if self._entered[state]), "idle")

    def _settle(self) -> None:
        now = self._now()
        self._seconds[self._current] += now - self._since
        self._since = now

    def describe(self) -> list[CounterMetricFamily]:
        return []

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            "streamrl_actor_time_seconds", "Wall time by state; the states of an actor add up to one second a second", labels=["state"]
        )
        for name, seconds in self.seconds().items():
            family.add_metric([name], seconds)
        yield family

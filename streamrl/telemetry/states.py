"""Where an actor's time goes: one counter over states that adds up to wall time, whatever runs side by side.

An actor runs many things at once (sixty sessions generate, one is being scored, a loop waits for a lease). Each second is given to the
most telling of the states entered at that moment: work that stops generation first, then work, then waits; ``idle`` when none is.
Time counts from the making of the clock: what a process does before that (its start, its imports) is in no state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

STATES: tuple[str, ...] = (  # from the most to the least telling
    "weight_sync",  # rollout: takes up a version; trainer: waits for a publication
    "forward_backward",
    "optimizer",
    "logprobs",  # scoring passes: old, reference, values, reward model
    "advantages",
    "fetch",  # columns from and to the store
    "pack",
    "publish",  # a snapshot of the weights
    "checkpoint",
    "generate",  # an engine call is on its way
    "tool",  # no engine call, but the agent loop: its tools and environments, and without any its templates and tokens
    "reward",
    "wait_learner",  # the trainer, for its ranks
    "wait_data",  # the trainer, for a batch; a learner rank, for work
    "wait_admission",  # the prompt feeder, for a slot; a rollout actor, for a group
    "evaluate",  # the trainer, for a validation
    "start",
    "idle",  # nothing of these: it answers calls, or nothing happens
)
_WORK = ("forward_backward", "optimizer", "logprobs", "advantages", "fetch", "pack", "publish", "checkpoint")
STATES_OF: dict[str, tuple[str, ...]] = {  # those that are on the page from the start, beside start and idle
    "prompt": ("wait_admission",),
    "rollout": ("weight_sync", "generate", "tool", "reward", "wait_admission"),
    "trainer": ("weight_sync", "publish", "checkpoint", "wait_learner", "wait_data", "evaluate"),
    "learner": (*_WORK, "wait_data"),
}


_RANK = {state: place for place, state in enumerate(STATES)}


class StateBlock:
    """A block of code in one state; one object serves any number of them."""

    __slots__ = ("_clock", "_name")

    def __init__(self, clock: StateClock, name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._clock.enter(self._name)

    def __exit__(self, *_: object) -> None:
        self._clock.leave(self._name)


class StateClock(Collector):
    """Seconds by state since construction. Thread-safe; entering and leaving cost about a microsecond. ``shown``: on the page also at 0 seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic, shown: tuple[str, ...] = STATES) -> None:
        self._now = now
        self._shown = {*shown, "start", "idle"}
        self._lock = threading.Lock()
        self._entered = dict.fromkeys(STATES, 0)  # how many blocks are inside each state
        self._seconds = dict.fromkeys(STATES, 0.0)
        self._blocks = {name: StateBlock(self, name) for name in STATES}
        self._current = "idle"
        self._since = now()

    def state(self, name: str) -> StateBlock:
        """``with clock.state(name):`` the block is in state ``name``."""
        return self._blocks[name]

    def blocks_in(self, name: str) -> int:
        """How many blocks are inside a state now."""
        return self._entered[name]

    def seconds(self) -> dict[str, float]:
        """Seconds by state up to now."""
        with self._lock:
            self._settle()
            return dict(self._seconds)

    def enter(self, name: str) -> None:
        with self._lock:
            self._entered[name] += 1
            if _RANK[name] < _RANK[self._current]:
                self._settle()
                self._current = name

    def leave(self, name: str) -> None:
        with self._lock:
            self._entered[name] -= 1
            if name == self._current and not self._entered[name]:
                self._settle()
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
            if seconds or name in self._shown:
                family.add_metric([name], seconds)
        yield family

"""Phases of a step, timed as a state of the actor and as one observation a step: a phase that comes several times in a step is added up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from streamrl.telemetry.metrics import Metrics


class Phases:
    """Of one learner rank. What is timed is the host's wait: work that a device does later belongs to the phase that waits for it."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """``with phases("pack"):`` a part of the step under way."""
        began = time.perf_counter()
        with self._metrics.state(name):
            try:
                yield
            finally:
                self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """An observation of its own; may run beside the step, in another thread."""
        began = time.perf_counter()
        with self._metrics.state(name):
            yield
        self._metrics.observe("streamrl_learner_phase_seconds", time.perf_counter() - began, phase=name)

    def end_of_step(self) -> None:
        """Observe what has added up; nothing at all is no step."""
        seconds, self._seconds = self._seconds, {}
        for name, spent in seconds.items():
            self._metrics.observe("streamrl_learner_phase_seconds", spent, phase=name)

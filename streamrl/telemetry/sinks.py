"""Experiment trackers: one call a step record, with verl's names, so that curves of both can be laid over each other.

The step log (``metrics/steps.jsonl``) is always written, by the driver itself. Here is what the optional ones have in common, which ``trackers.py`` makes.

Guarantees: a tracker never slows or ends a run. Each has a thread of its own, which also starts it; one that fails, or that hangs in one call for
``HANG_S``, is given up with one warning, and the others go on.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from streamrl.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

HANG_S = 180.0  # wandb itself gives a start up after 90 s
CLOSE_S = 20.0  # at the end of a run, for what is still to be written
WAITING_RECORDS = 10_000  # more than a run makes in HANG_S


class Sink(Protocol):
    """Where the numbers of a step go. Called by one thread."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """``values`` of training step ``step``; called again for the same step when it is validated."""

    def close(self) -> None:
        """Everything that was written is kept."""


def tracked_values(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step record (``pipeline/records.py``, as a plain dict) by verl's names.

    >>> tracked_values({"step": 7, "version": 6, "val_accuracy": 0.5, "metrics": {"val-core/math/acc/mean@1": 0.5}})
    {'training/global_step': 7, 'training/weight_version': 6, 'val/accuracy': 0.5, 'val-core/math/acc/mean@1': 0.5}
    """
    zeros = dict.fromkeys(_COUNTS, 0.0) if "step_s" in record else {}  # left out of the record of a training step, and still zero
    values = {name: record[field] for field, name in _NAMES.items() if record.get(field) is not None}
    return zeros | values | dict(record.get("metrics", {}))


_NAMES = {
    "step": "training/global_step",
    "version": "training/weight_version",
    "step_s": "timing_s/step",
    "wait_data_s": "timing_s/wait_data",
    "tokens_per_s": "perf/throughput",
    "trajectories_per_s": "perf/trajectories_per_s",
    "lag_mean": "training/off_policy/lag_mean",
    "lag_max": "training/off_policy/lag_max",
    "dropped": "training/off_policy/dropped_groups",
    "val_accuracy": "val/accuracy",
}
_COUNTS = ("training/off_policy/lag_mean", "training/off_policy/lag_max", "training/off_policy/dropped_groups")


class Sinks:
    """All trackers of a run. ``makers``: how each is started, by its name in ``trainer.logger``."""

    def __init__(self, makers: Mapping[str, Callable[[], Sink]], metrics: Metrics) -> None:
        self._threads = [_SinkThread(name, make, metrics) for name, make in makers.items()]

    def write(self, record: Mapping[str, Any]) -> None:
        """Hand a step record to everyone; returns at once."""
        values = tracked_values(record) if self._threads else {}
        for thread in self._threads:
            thread.put(int(record["step"]), values)

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Wait for what is still to be written, ``limit_s`` for all together."""
        until = time.monotonic() + limit_s
        for thread in self._threads:
            thread.finish()
        for thread in self._threads:
            thread.join(until - time.monotonic())


class _SinkThread:
    """Starts, feeds and closes one tracker. What it raises, or a call that hangs, disables it."""

    def __init__(self, name: str, make: Callable[[], Sink], metrics: Metrics) -> None:
        self._name, self._make, self._metrics = name, make, metrics
        self._records: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(WAITING_RECORDS)
        self._busy_since: float | None = None
        self._disabled = False
        self._thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)  # one that hangs must not keep a driver alive
        self._thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        if self._disabled:
            return
        since = self._busy_since
        if since is not None and time.monotonic() - since > HANG_S:
            self._disable(f"one call has taken more than {HANG_S:g} s")
            return
        try:
            self._records.put_nowait((step, values))
        except queue.Full:
            self._disable(f"{WAITING_RECORDS} records wait for it")

    def finish(self) -> None:
        if self._disabled:
            return
        try:
            self._records.put_nowait(None)
        except queue.Full:
            self._disable(f"{WAITING_RECORDS} records wait for it")

    def join(self, limit_s: float) -> None:
        if self._disabled:
            return
        self._thread.join(max(0.0, limit_s))
        if self._thread.is_alive():
            self._disable("it has not written everything when the run ended")

    def _work(self) -> None:
        try:
            self._busy_since = time.monotonic()
            sink = self._make()
            while (record := self._next()) is not None and not self._disabled:
                sink.write(*record)
            sink.close()
        except BaseException as error:  # of whatever kind: wandb also raises its own exits
            self._disable(f"{type(error).__name__}: {error}")

    def _next(self) -> tuple[int, Mapping[str, float]] | None:
        self._busy_since = None
        record = self._records.get()
        self._busy_since = time.monotonic()
        return record

    def _disable(self, why: str) -> None:
        if not self._disabled:
            self._disabled = True
            self._metrics.inc("streamrl_telemetry_errors_total", kind="sink")
            log.warning("the run is not logged to %s any more (%s); it goes on, and metrics/steps.jsonl has every step", self._name, why)

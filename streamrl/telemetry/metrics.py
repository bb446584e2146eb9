"""The metrics of one actor: a registry of its own, writes by declared name, a page for Prometheus.

Guarantees: telemetry never breaks the run (a fault is logged once and counted in ``streamrl_telemetry_errors_total``; with ``strict``,
which tests use, it raises); labels are bounded; two objects in one process never meet. Shares no lock with the data path.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import product
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, disable_created_metrics, generate_latest, start_http_server
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from streamrl.telemetry.catalogue import CATALOGUE, MetricSpec
from streamrl.telemetry.states import STATES, StateClock

log = logging.getLogger(__name__)

MAX_FREE_VALUES = 20
OTHER = "other"
STRICT_ENV = "STREAMRL_STRICT_METRICS"  # set to 1 by the test suite
_TIME = "streamrl_actor_time_seconds_total"

disable_created_metrics()  # a quarter of all samples, and nobody reads them


class Metrics:
    """Metrics of one actor. ``role`` decides which series exist from the start, so that the first drop is visible to ``increase()``."""

    def __init__(self, role: str, actor: str, *, strict: bool | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self.role = role
        self.actor = actor
        self.registry = CollectorRegistry()
        self._strict = os.environ.get(STRICT_ENV) == "1" if strict is None else strict
        self._lock = threading.Lock()  # creation of families and series only
        self._families: dict[str, Any] = {}
        self._series: dict[tuple[str, str, frozenset[tuple[str, str]]], Any] = {}
        self._free: dict[str, set[str]] = {}
        self._reported: set[str] = set()
        self._server: Any = None
        self._clock = StateClock(now)
        self.registry.register(self._clock)
        for spec in CATALOGUE.values():
            if role in spec.roles and spec.name != _TIME:
                self._create(spec)

    def inc(self, name: str, value: float = 1, **labels: str) -> None:
        """Add to a counter."""
        self._write(name, "counter", "inc", (value,), labels)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._write(name, "gauge", "set", (value,), labels)

    def observe(self, name: str, value: float, *, times: int = 1, **labels: str) -> None:
        """Add an observation to a histogram; ``times`` > 1 only for weighted ones."""
        spec = CATALOGUE.get(name)
        weighted = spec is not None and spec.kind == "weighted_histogram"
        self._write(name, "weighted_histogram" if weighted else "histogram", "observe", (value, times) if weighted else (value,), labels)

    def info(self, name: str, **values: str) -> None:
        """State constants of the run."""
        self._write(name, "info", "info", (values,), {})

    def state(self, name: str) -> AbstractContextManager[None]:
        """``with metrics.state("generate"):`` gives the block's wall time to that state."""
        if name not in STATES:
            self._fault("label", f"a state is one of {', '.join(STATES)}, got {name!r}; declare it in telemetry/states.py")
            name = "idle"
        return self._clock.state(name)

    def seconds_by_state(self) -> dict[str, float]:
        """Where the time went so far."""
        return self._clock.seconds()

    def page(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)

    def serve(self, host: str = "127.0.0.1") -> int:
        """Serve the page on a free port and return the port; 0 when that is not possible (the run goes on without a page)."""
        try:
            self._server, _ = start_http_server(0, addr=host, registry=self.registry)
            return int(self._server.server_port)
        except Exception as error:  # exporter trouble of any kind must not end a run
            log.warning("metrics of %s are not served on %s: %s", self.actor, host, error)
            self._count("exporter")
            return 0

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _write(self, name: str, kind: str, verb: str, args: tuple[Any, ...], labels: dict[str, str]) -> None:
        series = self._series.get((name, kind, frozenset(labels.items()))) or self._find(name, kind, labels)
        if series is None:
            return
        try:
            getattr(series, verb)(*args)
        except (ValueError, TypeError) as error:
            self._fault("value", f"{name} is a {kind}, got {verb}{args}: {error}; correct the call")

    def _find(self, name: str, kind: str, labels: dict[str, str]) -> Any:
        """The series, created on first use; None after a fault."""
        spec = CATALOGUE.get(name)
        if spec is None:
            return self._fault("undeclared", f"metrics are declared in telemetry/catalogue.py, got the unknown name {name!r}; declare it there")
        if spec.kind != kind or name == _TIME:
            return self._fault("value", f"{name} is a {spec.kind}, got a write as {kind}; use the method of its kind")
        if set(labels) != set(spec.labels):
            return self._fault("label", f"{name} has the labels {sorted(spec.labels)}, got {sorted(labels)}; pass exactly these")
        values: dict[str, str] = {}
        for label, value in labels.items():
            allowed = spec.labels[label]
            if allowed and value not in allowed:
                return self._fault("label", f"label {label} of {name} is one of {', '.join(allowed)}, got {value!r}; declare it in the catalogue")
            values[label] = value if allowed else self._capped(label, value)
        series = self._create(spec).labels(**values) if spec.labels else self._create(spec)
        if OTHER not in values.values():  # values beyond the cap are not remembered, or they would grow without bound here
            self._series[name, kind, frozenset(labels.items())] = series
        return series

    def _capped(self, label: str, value: str) -> str:
        with self._lock:
            known = self._free.setdefault(label, set())
            if value in known or len(known) < MAX_FREE_VALUES:
                known.add(value)
                return value
            return OTHER

    def _create(self, spec: MetricSpec) -> Any:
        with self._lock:
            if spec.name not in self._families:
                self._families[spec.name] = _family(spec, self.registry)
            return self._families[spec.name]

    def _fault(self, kind: str, message: str) -> None:
        """Count it; log the same fault once; raise under ``strict``."""
        self._count(kind)
        if self._strict:
            raise ValueError(message)
        if message not in self._reported and len(self._reported) < 100:
            self._reported.add(message)
            log.warning("metric ignored: %s", message)

    def _count(self, kind: str) -> None:
        self._create(CATALOGUE["streamrl_telemetry_errors_total"]).labels(kind=kind).inc()


class NullMetrics(Metrics):
    """Accepts every write and keeps nothing, so that no caller needs an ``if``."""

    def __init__(self, role: str = "", actor: str = "") -> None:
        super().__init__(role, actor, strict=False)

    def _write(self, name: str, kind: str, verb: str, args: tuple[Any, ...], labels: dict[str, str]) -> None:
        return None

    def serve(self, host: str = "127.0.0.1") -> int:
        return 0


class _WeightedHistogram(Collector):
    """A histogram whose observations carry a count: one call per (trajectory, lag) instead of one per token."""

    def __init__(self, spec: MetricSpec, registry: CollectorRegistry) -> None:
        self._spec = spec
        self._bounds = (*spec.buckets, math.inf)
        self._lock = threading.Lock()
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, times: int) -> None:
        place = next((i for i, bound in enumerate(self._bounds) if value <= bound), None)
        if place is None or times < 0:
            raise ValueError(f"an observation is a number with a count of 0 or more, got {value} x {times}")
        with self._lock:
            self._counts[place] += times
            self._sum += value * times

    def describe(self) -> list[HistogramMetricFamily]:
        return []

    def collect(self) -> Iterator[HistogramMetricFamily]:
        with self._lock:
            counts, total = list(self._counts), self._sum
        running, buckets = 0, []
        for bound, count in zip(self._bounds, counts, strict=True):
            running += count
            buckets.append((floatToGoString(bound), running))
        family = HistogramMetricFamily(self._spec.name, self._spec.help)
        family.add_metric([], buckets, total)
        yield family


def _family(spec: MetricSpec, registry: CollectorRegistry) -> Any:
    labels = list(spec.labels)
    if spec.kind == "histogram":
        return Histogram(spec.name, spec.help, labels, registry=registry, buckets=spec.buckets)
    if spec.kind == "weighted_histogram":
        return _WeightedHistogram(spec, registry)
    if spec.kind == "info":
        return Info(spec.name.removesuffix("_info"), spec.help, registry=registry)
    family = (Counter if spec.kind == "counter" else Gauge)(spec.name, spec.help, labels, registry=registry)
    if spec.kind == "counter" and labels and spec.has_only_enums:
        for values in product(*spec.labels.values()):
            family.labels(*values)
    return family

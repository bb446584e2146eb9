"""The metrics of one actor: a registry of its own, writes by declared name, a page for Prometheus.

Guarantees: telemetry never breaks the run (a fault is logged once and counted in ``streamrl_telemetry_errors_total``; with ``strict``,
which tests use, it raises); labels are bounded; two objects in one process never meet; a page shows all writes of a ``whole`` block or none.
Shares no lock with the data path: the one that a scrape takes is taken by ``whole`` blocks alone.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Info, disable_created_metrics, generate_latest, start_http_server
from prometheus_client.core import Metric

from streamrl.telemetry.catalogue import CATALOGUE, MetricSpec
from streamrl.telemetry.families import Family
from streamrl.telemetry.states import STATES, STATES_OF, StateClock

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
        self.registry = _Page(lambda: self._count("exporter"))
        self._strict = os.environ.get(STRICT_ENV) == "1" if strict is None else strict
        self._lock = threading.Lock()  # creation of families and series only
        self._families: dict[str, Any] = {}
        self._series: dict[tuple[str, str, tuple[tuple[str, str], ...]], Any] = {}
        self._free: dict[str, set[str]] = {}
        self._reported: set[str] = set()
        self._server: Any = None
        self._clock = StateClock(now, STATES_OF.get(role, ()))
        self.registry.register(self._clock)
        for spec in CATALOGUE.values():
            if role in spec.roles and spec.name != _TIME and spec.kind != "gauge":  # a gauge that nobody set has no value, not the value 0
                self._create(spec)

    def inc(self, name: str, value: float = 1, **labels: str) -> None:
        """Add to a counter."""
        self._write(name, "counter", "inc", (value,), labels)

    def total(self, name: str, value: float, **labels: str) -> None:
        """Bring a counter to a total that is kept elsewhere. It falls only when that total fell, which Prometheus reads as a restart."""
        self._write(name, "counter", "total", (value,), labels)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._write(name, "gauge", "set", (value,), labels)

    def observe(self, name: str, value: float, *, times: int = 1, **labels: str) -> None:
        """Add an observation to a histogram; ``times`` > 1 only for weighted ones."""
        spec = CATALOGUE.get(name)
        weighted = spec is not None and spec.kind == "weighted_histogram"
        self._write(name, "weighted_histogram" if weighted else "histogram", "observe", (value, times) if weighted else (value,), labels)

    def bound(self, name: str, **labels: str) -> Any:
        """The series itself (``Number`` or ``Buckets``), for writes that come by the thousand. It raises on a value that is no number."""
        spec = CATALOGUE.get(name)
        return self._find(name, "" if spec is None else spec.kind, labels) or Unwritten()

    def info(self, name: str, **values: str) -> None:
        """State constants of the run."""
        self._write(name, "info", "info", (values,), {})

    def state(self, name: str) -> AbstractContextManager[None]:
        """``with metrics.state("generate"):`` gives the block's wall time to that state."""
        if name not in STATES:
            self._fault("label", f"a state is one of {', '.join(STATES)}, got {name!r}; declare it in telemetry/states.py")
            name = "idle"
        return self._clock.state(name)

    def blocks_in(self, name: str) -> int:
        """How many blocks are inside a state now."""
        return self._clock.blocks_in(name)

    def seconds_by_state(self) -> dict[str, float]:
        """Where the time went so far."""
        return self._clock.seconds()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A page shows all writes of the block or none, so that sums over several series hold on every page. For rare, short blocks."""
        with self.registry.lock:
            yield

    def include(self, prefix: str, registry: CollectorRegistry = REGISTRY) -> None:
        """Serve the metrics of another registry too, those whose names begin with ``prefix``: of a library that uses prometheus_client in this process."""
        self.registry.included.append((prefix, registry))

    def page(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)

    def serve(self, host: str = "127.0.0.1", documents: Mapping[str, Callable[[], bytes]] | None = None) -> int:
        """Serve the page on a free port and return the port; 0 when that is not possible (the run goes on without a page). ``documents``: JSON by its path,
        made when it is asked for, such as the targets at ``/sd``."""
        try:
            self._server, _ = start_http_server(0, addr=host, registry=self.registry)
            self._server.set_app(_with_documents(documents or {}, self._server.get_app()))
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
        series = self._series.get((name, kind, tuple(labels.items()))) or self._find(name, kind, labels)
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
        family = self._create(spec)
        series = family.series(tuple(values[label] for label in spec.labels)) if isinstance(family, Family) else family
        if OTHER not in values.values():  # values beyond the cap are not remembered, or they would grow without bound here
            self._series[name, kind, tuple(labels.items())] = series
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
        self._create(CATALOGUE["streamrl_telemetry_errors_total"]).series((kind,)).inc(1)


class NullMetrics(Metrics):
    """Accepts every write and keeps nothing, so that no caller needs an ``if``."""

    def __init__(self, role: str = "", actor: str = "") -> None:
        super().__init__(role, actor, strict=False)

    def _write(self, name: str, kind: str, verb: str, args: tuple[Any, ...], labels: dict[str, str]) -> None:
        return None

    def bound(self, name: str, **labels: str) -> Any:
        return Unwritten()

    def serve(self, host: str = "127.0.0.1", documents: Mapping[str, Callable[[], bytes]] | None = None) -> int:
        return 0


def _with_documents(documents: Mapping[str, Callable[[], bytes]], page: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """The web application of the page, and of these beside it."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        make = documents.get(environ["PATH_INFO"])
        if make is None:
            return page(environ | {"HTTP_ACCEPT": _whole_names(environ.get("HTTP_ACCEPT", ""))}, start_response)
        start_response("200 OK", [("Content-Type", "application/json; charset=utf-8")])
        return [make()]

    return answer


def _whole_names(accept: str) -> str:
    """As OpenMetrics prometheus_client writes ``vllm:x`` as ``vllm_x``, unless it is asked for names as they are; Prometheus before 3.0 does not ask."""
    return "application/openmetrics-text; version=1.0.0; escaping=allow-utf-8" if "application/openmetrics-text" in accept else accept


class Unwritten:
    """In place of a series: after a fault, or where nothing is counted."""

    def inc(self, amount: float) -> None: ...
    def set(self, value: float) -> None: ...
    def observe(self, value: float, times: int = 1) -> None: ...


class _Page(CollectorRegistry):
    """An actor's registry and those it includes, collected at one moment. A fault of an included one costs its part of the page."""

    def __init__(self, on_fault: Callable[[], None]) -> None:
        super().__init__()
        self.lock = threading.RLock()
        self.included: list[tuple[str, CollectorRegistry]] = []
        self._on_fault = on_fault

    def collect(self) -> Iterable[Metric]:
        with self.lock:
            families = list(super().collect())
        for prefix, registry in self.included:
            try:
                families += [family for family in registry.collect() if family.name.startswith(prefix)]
            except Exception as error:  # code of others
                log.debug("metrics %s* are missing on a page: %s", prefix, error)
                self._on_fault()
        return families


def _family(spec: MetricSpec, registry: CollectorRegistry) -> Any:
    if spec.kind == "info":
        return Info(spec.name.removesuffix("_info"), spec.help, registry=registry)
    family = Family(spec)
    registry.register(family)
    return family

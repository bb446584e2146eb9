"""The series of one metric: numbers and buckets that a write changes in half a microsecond, and a page reads at its leisure.

prometheus_client's own metrics take several times as long for a write, and have no weighted observations. Doesn't know who may write what.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Iterator
from itertools import product

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from streamrl.telemetry.catalogue import MetricSpec

Labels = tuple[str, ...]  # values, in the order of the declaration


class Number:
    """A counter or a gauge. ``lock``: writes come from several threads."""

    __slots__ = ("_lock", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._lock = threading.Lock()

    def inc(self, amount: float) -> None:
        if not amount >= 0:
            raise ValueError("a counter grows by a number of 0 or more")
        with self._lock:
            self.value += amount

    def set(self, value: float) -> None:
        self.value = float(value)

    total = set  # of a counter that is kept elsewhere


class Buckets:
    """A histogram; ``observe`` takes a count with the value."""

    __slots__ = ("_bounds", "_lock", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float, times: int = 1) -> None:
        if math.isnan(value) or times < 0:
            raise ValueError("an observation is a number, with a count of 0 or more")
        place = bisect_left(self._bounds, value)  # the first bound that is not below it
        with self._lock:
            self.counts[place] += times
            self.sum += value * times

    def cumulative(self) -> tuple[list[tuple[str, int]], float]:
        """(bound, observations up to it), and the sum, of one moment."""
        with self._lock:
            counts, total = list(self.counts), self.sum
        running, buckets = 0, []
        for bound, count in zip((*self._bounds, math.inf), counts, strict=True):
            running += count
            buckets.append((floatToGoString(bound), running))
        return buckets, total


class Family(Collector):
    """All series of a declared metric. Counters whose labels are enums exist from the start, at 0, and so do histograms without labels."""

    def __init__(self, spec: MetricSpec) -> None:
        self.spec = spec
        self._is_histogram = spec.kind in ("histogram", "weighted_histogram")
        self._series: dict[Labels, Number | Buckets] = {}
        self._lock = threading.Lock()
        if spec.kind == "counter" and spec.has_only_enums:
            for values in product(*spec.labels.values()):
                self.series(values)
        elif self._is_histogram and not spec.labels:
            self.series(())

    def series(self, values: Labels) -> Number | Buckets:
        """The one with these labels, made on first use."""
        with self._lock:
            if values not in self._series:
                self._series[values] = Buckets(self.spec.buckets) if self._is_histogram else Number()
            return self._series[values]

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            series = list(self._series.items())
        name = self.spec.name
        metric = Metric(name.removesuffix("_total"), self.spec.help, "histogram" if self._is_histogram else self.spec.kind)
        for values, one in series:
            labels = dict(zip(self.spec.labels, values, strict=True))
            if isinstance(one, Number):
                metric.add_sample(name, labels, one.value)
            else:
                self._add_buckets(metric, labels, one)
        yield metric

    def _add_buckets(self, metric: Metric, labels: dict[str, str], one: Buckets) -> None:
        buckets, total = one.cumulative()
        for bound, count in buckets:
            metric.add_sample(f"{self.spec.name}_bucket", labels | {"le": bound}, count)
        metric.add_sample(f"{self.spec.name}_count", labels, buckets[-1][1])
        if self.spec.buckets[0] >= 0:  # as OpenMetrics wants it: a sum that may fall is none
            metric.add_sample(f"{self.spec.name}_sum", labels, total)

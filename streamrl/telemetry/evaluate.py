"""Answers a ``Query`` from a recording, as Prometheus would from its scrapes.

    evaluate(Rate("streamrl_rollout_tokens_total"), recording, window_s=20.0)
    -> [Series(labels={}, times=[...], values=[nan, 812.4, 820.0, ...])]

Guarantees: a rate is the increase between the first and the last sample of the window, over the time between them; a counter that fell began anew
at 0, so a restart costs what it counted between its last sample and its death and nothing else. Where a series covers the window, that is
Prometheus's rate; at its birth and death it isn't thinned out by the part of the window that it did not live. Quantiles interpolate as
``histogram_quantile`` does. A series ends with its actor: nothing is carried across a gap.
Not covered: PromQL, and counters that were reset and passed their old value between two samples, which no reader can see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from streamrl.telemetry.queries import Age, Aggregation, Buckets, Difference, Latest, Mean, Quantile, Query, Rate, Ratio, Where, labels_of

Values = NDArray[np.float64]
Labels = tuple[str, ...]  # values of a query's labels, in their order
Answer = dict[Labels, Values]

LIVE_SCRAPES = 1.6  # a sample speaks for this many scrape intervals; then its actor is taken to be gone


class RecordedSeries(Protocol):
    """One series as it was scraped. Times ascend; an actor that was away leaves a gap."""

    @property
    def labels(self) -> dict[str, str]: ...
    @property
    def times(self) -> Sequence[float]: ...
    @property
    def values(self) -> Sequence[float]: ...


class Source(Protocol):
    """What ``evaluate`` needs of a recording. ``metric`` is a name as on the page: ``streamrl_x_total``, ``streamrl_h_bucket``."""

    @property
    def times(self) -> Sequence[float]: ...
    def series(self, metric: str) -> Iterable[RecordedSeries]: ...


@dataclass(frozen=True)
class Series:
    """One line of a chart. ``values[i]`` is at ``times[i]`` (unix seconds), nan where there is none."""

    labels: dict[str, str]
    times: list[float]
    values: list[float]


def evaluate(query: Query, recording: Source, window_s: float) -> list[Series]:
    """The query at each scrape; ``Buckets`` give one Series per ``le``, ascending. Empty when nobody wrote the metric."""
    at = _Instants(recording, window_s)
    names = labels_of(query)
    times = at.times.tolist()
    found = _answer(query, at)
    order = (lambda labels: float(labels[0])) if isinstance(query, Buckets) else None
    return [Series(dict(zip(names, labels, strict=True)), times, found[labels].tolist()) for labels in sorted(found, key=order)]


def totals(recording: Source, metric: str, by: tuple[str, ...] = (), where: Where | None = None) -> dict[Labels, float]:
    """What counters came to over the whole recording, lives of restarted actors added up: ``{("trainer", "publish"): 1.75, ...}``."""
    found: dict[Labels, float] = {}
    for labels, _, values in _selected(recording, metric, by, where or {}):
        found[labels] = found.get(labels, 0.0) + float(values[0] + _increases(values).sum())
    return found


def newest(recording: Source, metric: str, by: tuple[str, ...] = (), where: Where | None = None) -> dict[Labels, float]:
    """Each series' last sample, summed by label set. Of counters that their owner restores after a restart (the ledger) this is the total."""
    found: dict[Labels, float] = {}
    for labels, _, values in _selected(recording, metric, by, where or {}):
        found[labels] = found.get(labels, 0.0) + float(values[-1])
    return found


def scrape_interval_s(times: Sequence[float]) -> float:
    """The usual distance of two scrapes; 0 with fewer than two."""
    return float(np.median(np.diff(np.asarray(times, dtype=np.float64)))) if len(times) > 1 else 0.0


class _Instants:
    """When to answer, how far a rate looks back, how long a sample speaks for its series."""

    def __init__(self, recording: Source, window_s: float) -> None:
        self.recording = recording
        self.times: Values = np.asarray(recording.times, dtype=np.float64)
        self.window_s = window_s
        self.live_s = LIVE_SCRAPES * scrape_interval_s(recording.times)


def _answer(query: Query, at: _Instants) -> Answer:
    match query:
        case Latest(metric, agg, by, where):
            return _aggregated(_lines(at, metric, by, where, _latest), agg)
        case Age(metric, agg, by, where):
            lines = _lines(at, metric, by, where, _latest)
            ages = [(labels, np.where(values > 0, np.maximum(at.times - values, 0.0), np.nan)) for labels, values in lines]  # 0: never happened
            return _aggregated(ages, agg)
        case Rate(metric, by, where, part):
            return _rates(at, f"{metric}_{part}" if part else metric, by, where)
        case Mean(metric, by, where):
            return _joined(_rates(at, f"{metric}_sum", by, where), _rates(at, f"{metric}_count", by, where), _quotient)
        case Quantile(q, metric, by, where):
            return {labels: _quantile(q, bounds, counts) for labels, (bounds, counts) in _histograms(at, metric, by, where).items()}
        case Buckets(metric, where):
            return _apart(at, metric, where)
        case Ratio(over, under):
            return _joined(_answer(over, at), _answer(under, at), _quotient)
        case Difference(left, right):
            return _joined(_answer(left, at), _answer(right, at), np.subtract)


# ---- series


def _selected(recording: Source, sample: str, by: tuple[str, ...], where: Where) -> Iterator[tuple[Labels, Values, Values]]:
    """(label values, times, values) of every series that matches; never empty ones."""
    for series in recording.series(sample):
        if all(series.labels.get(label, "") in ((value,) if isinstance(value, str) else value) for label, value in where.items()):
            times, values = np.asarray(series.times, dtype=np.float64), np.asarray(series.values, dtype=np.float64)
            known = ~np.isnan(values)
            if known.any():
                yield tuple(series.labels.get(label, "") for label in by), times[known], values[known]


def _lines(at: _Instants, sample: str, by: tuple[str, ...], where: Where, kind: Callable[[_Instants, Values, Values], Values]) -> list[tuple[Labels, Values]]:
    return [(labels, kind(at, times, values)) for labels, times, values in _selected(at.recording, sample, by, where)]


def _latest(at: _Instants, times: Values, values: Values) -> Values:
    newest = np.searchsorted(times, at.times, side="right") - 1
    found = values[np.maximum(newest, 0)]
    return np.where(_lives(at, times, newest), found, np.nan)


def _rate(at: _Instants, times: Values, values: Values) -> Values:
    """First and last sample of [t - window, t]; the steps between them, over the time between them."""
    grown = np.concatenate(([0.0], np.cumsum(_increases(values))))
    last = np.searchsorted(times, at.times, side="right") - 1
    first = np.searchsorted(times, at.times - at.window_s, side="left")
    two = (last > first) & _lives(at, times, last)
    first, last = np.where(two, first, 0), np.where(two, last, 0)
    return _quotient(grown[last] - grown[first], np.where(two, times[last] - times[first], np.nan))


def _increases(values: Values) -> Values:
    """Between neighbouring samples; after a fall the counter began at 0."""
    steps = np.diff(values)
    return np.where(steps < 0, values[1:], steps)


def _lives(at: _Instants, times: Values, newest: NDArray[np.intp]) -> NDArray[np.bool_]:
    return (newest >= 0) & (at.times - times[np.maximum(newest, 0)] <= at.live_s)


# ---- many series


def _rates(at: _Instants, sample: str, by: tuple[str, ...], where: Where) -> Answer:
    return _aggregated(_lines(at, sample, by, where, _rate), "sum")


def _aggregated(lines: list[tuple[Labels, Values]], agg: Aggregation) -> Answer:
    """Over the series that have a value at the time; nan when none has."""
    groups: dict[Labels, list[Values]] = {}
    for labels, values in lines:
        groups.setdefault(labels, []).append(values)
    return {labels: _fold(np.stack(members), agg) for labels, members in groups.items()}


def _fold(stack: Values, agg: Aggregation) -> Values:
    known = ~np.isnan(stack)
    number = known.sum(axis=0)
    if agg == "count":
        folded = number.astype(np.float64)
    elif agg in ("sum", "avg"):
        folded = np.where(known, stack, 0.0).sum(axis=0) / (np.maximum(number, 1) if agg == "avg" else 1)
    else:
        folded = np.where(known, stack, -math.inf).max(axis=0) if agg == "max" else np.where(known, stack, math.inf).min(axis=0)
    return np.where(number > 0, folded, np.nan)


def _joined(left: Answer, right: Answer, combine: Callable[[Values, Values], Any]) -> Answer:
    """Equal label sets, or one on the right for all."""
    if () in right:
        return {labels: combine(values, right[()]) for labels, values in left.items()}
    return {labels: combine(values, right[labels]) for labels, values in left.items() if labels in right}


def _quotient(over: Values, under: Values) -> Values:
    return np.divide(over, under, out=np.full_like(over, np.nan), where=under != 0)


# ---- histograms


def _histograms(at: _Instants, metric: str, by: tuple[str, ...], where: Where) -> dict[Labels, tuple[Values, Values]]:
    """Bounds ascending (the last is infinite) and cumulative counts per second, one row a bound."""
    rates = _rates(at, f"{metric}_bucket", (*by, "le"), where)
    found: dict[Labels, list[tuple[float, Values]]] = {}
    for labels, values in rates.items():
        found.setdefault(labels[:-1], []).append((float(labels[-1]), values))
    histograms = {}
    for labels, rows in found.items():
        rows.sort(key=lambda row: row[0])
        counts = np.maximum.accumulate(np.stack([values for _, values in rows]), axis=0)  # sums of floats may dip in the last digit
        histograms[labels] = (np.array([bound for bound, _ in rows]), counts)
    return histograms


def _quantile(q: float, bounds: Values, counts: Values) -> Values:
    """Linear inside the bucket that holds the rank; the first bucket begins at 0, and beyond the last finite bound is that bound."""
    total = counts[-1]
    rank = q * total
    place = np.minimum((counts < rank * (1 - 1e-12)).sum(axis=0), len(bounds) - 1)  # q = 1: the highest bucket in use, whatever the last digit
    columns = np.arange(counts.shape[1])
    below = np.where(place > 0, counts[place - 1, columns], 0.0)
    start = np.where(place > 0, bounds[place - 1], np.minimum(bounds[0], 0.0))
    with np.errstate(invalid="ignore"):
        inside = start + (bounds[place] - start) * _quotient(rank - below, counts[place, columns] - below)
    overflow = bounds[-2] if len(bounds) > 1 else np.nan
    return np.where(total > 0, np.where(place == len(bounds) - 1, overflow, inside), np.nan)


def _apart(at: _Instants, metric: str, where: Where) -> Answer:
    """Cumulative buckets taken apart."""
    rates = _rates(at, f"{metric}_bucket", ("le",), where)
    below: Values | None = None
    found: Answer = {}
    for labels in sorted(rates, key=lambda labels: float(labels[0])):
        found[labels] = rates[labels] if below is None else np.maximum(rates[labels] - below, 0.0)
        below = rates[labels]
    return found

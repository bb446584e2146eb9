"""What a chart shows, said once for two readers: ``promql`` makes it text for Prometheus, ``evaluate`` computes it from a run's recording.

    Rate("streamrl_rollout_tokens_total", by=("kind",))
    -> sum by (kind) (rate(streamrl_rollout_tokens_total{run="$run"}[$__rate_interval]))

Guarantees: a query names declared metrics, labels and label values only (refused at construction), so a chart can't ask for what nobody
writes; every query is of one run, the dashboard's variable ``run``. Rates are over the window that the reader chooses.
Not covered: alerts and recording rules, which look at all runs of a Prometheus and are written in PromQL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias

import msgspec

from streamrl.telemetry.catalogue import CATALOGUE, ROLES, Kind, MetricSpec

UP = MetricSpec("up", "gauge", "", "1 when the last scrape of the actor's page answered, 0 when it did not; written by the scraper", ROLES)
QUERYABLE: dict[str, MetricSpec] = {**CATALOGUE, UP.name: UP}
TARGET_LABELS: tuple[str, ...] = ("run", "role", "actor")  # what the scrape target adds to each series of an actor
Aggregation = Literal["sum", "max", "min", "avg", "count"]
Where: TypeAlias = Mapping[str, str | tuple[str, ...]]

_HISTOGRAMS: tuple[Kind, ...] = ("histogram", "weighted_histogram")


class Latest(msgspec.Struct, frozen=True):
    """A gauge, or a counter as it stands (then since the actor's start), aggregated over the series of each ``by``."""

    metric: str
    agg: Aggregation = "sum"
    by: tuple[str, ...] = ()
    where: Where = {}

    def __post_init__(self) -> None:
        _check(self.metric, ("gauge", "counter", "info"), self.by, self.where)


class Age(msgspec.Struct, frozen=True):
    """Seconds since the unix time that a ``_timestamp_seconds`` gauge holds; of several series, by ``agg`` over their ages.

    A gauge that still holds 0 was never set and has no age. None is below 0: a gauge may be set while its page is scraped, or by a clock that is ahead.
    """

    metric: str
    agg: Aggregation = "max"
    by: tuple[str, ...] = ()
    where: Where = {}

    def __post_init__(self) -> None:
        _check(self.metric, ("gauge",), self.by, self.where)
        if not self.metric.endswith("_timestamp_seconds"):
            raise ValueError(f"an age is of a metric that ends in _timestamp_seconds, got {self.metric!r}; use Latest")


class Rate(msgspec.Struct, frozen=True):
    """Per second: a counter, or of a histogram its ``part``: observations (count) or their sum."""

    metric: str
    by: tuple[str, ...] = ()
    where: Where = {}
    part: Literal["", "count", "sum"] = ""

    def __post_init__(self) -> None:
        _check(self.metric, _HISTOGRAMS if self.part else ("counter",), self.by, self.where)
        _check_sum(self.metric, self.part == "sum")


class Quantile(msgspec.Struct, frozen=True):
    """Quantile ``q`` of a histogram's observations in the window, interpolated inside its bucket; q = 1 is the upper bound of the highest bucket in use.

    No value without observations.
    """

    q: float
    metric: str
    by: tuple[str, ...] = ()
    where: Where = {}

    def __post_init__(self) -> None:
        _check(self.metric, _HISTOGRAMS, self.by, self.where)
        if not 0.0 < self.q <= 1.0:
            raise ValueError(f"a quantile is above 0 and at most 1, got q={self.q}")


class Mean(msgspec.Struct, frozen=True):
    """Mean of a histogram's observations in the window: sum over count. No value without observations."""

    metric: str
    by: tuple[str, ...] = ()
    where: Where = {}

    def __post_init__(self) -> None:
        _check(self.metric, _HISTOGRAMS, self.by, self.where)
        _check_sum(self.metric, True)


class Buckets(msgspec.Struct, frozen=True):
    """A heatmap: observations per second and bucket ``le``. Prometheus answers cumulative buckets, which Grafana takes apart."""

    metric: str
    where: Where = {}

    def __post_init__(self) -> None:
        _check(self.metric, _HISTOGRAMS, (), self.where)


class Ratio(msgspec.Struct, frozen=True):
    """``over`` / ``under``, label set by label set: both have the same ``by``, or ``under`` has none and divides them all. No value where ``under`` is 0."""

    over: Query
    under: Query

    def __post_init__(self) -> None:
        _check_sides(self.over, self.under)


class Difference(msgspec.Struct, frozen=True):
    """``left`` - ``right``, label set by label set: both have the same ``by``, or ``right`` has none and is taken from them all."""

    left: Query
    right: Query

    def __post_init__(self) -> None:
        _check_sides(self.left, self.right)


Query: TypeAlias = Latest | Age | Rate | Quantile | Mean | Buckets | Ratio | Difference


def labels_of(query: Query) -> tuple[str, ...]:
    """The labels that the result has."""
    if isinstance(query, Ratio):
        return labels_of(query.over)
    if isinstance(query, Difference):
        return labels_of(query.left)
    return ("le",) if isinstance(query, Buckets) else query.by


def metrics_of(query: Query) -> Iterator[str]:
    """The declared names that the query reads."""
    if isinstance(query, Ratio | Difference):
        left, right = (query.over, query.under) if isinstance(query, Ratio) else (query.left, query.right)
        yield from metrics_of(left)
        yield from metrics_of(right)
    else:
        yield query.metric


def promql(query: Query) -> str:
    """The query as PromQL, with Grafana's variables ``$run`` and ``$__rate_interval``."""
    match query:
        case Latest(metric, agg, by, where):
            return f"{_aggregate(agg, by)} ({_select(metric, where)})"
        case Age(metric, agg, by, where):
            return f"{_aggregate(agg, by)} (clamp_min(time() - ({_select(metric, where)} > 0), 0))"
        case Rate(metric, by, where, part):
            return _rate(f"{metric}_{part}" if part else metric, by, where)
        case Quantile(q, metric, by, where):
            return f"histogram_quantile({q:g}, {_rate(f'{metric}_bucket', ('le', *by), where)})"
        case Mean(metric, by, where):
            return f"{_rate(f'{metric}_sum', by, where)} / {_rate(f'{metric}_count', by, where)}"
        case Buckets(metric, where):
            return _rate(f"{metric}_bucket", ("le",), where)
        case Ratio(over, under):
            return f"{_operand(over)} / {_matching(over, under)}{_operand(under)}"
        case Difference(left, right):
            return f"{_operand(left)} - {_matching(left, right)}{_operand(right)}"


def _rate(sample: str, by: tuple[str, ...], where: Where) -> str:
    return f"{_aggregate('sum', by)} (rate({_select(sample, where)}[$__rate_interval]))"


def _aggregate(agg: Aggregation, by: tuple[str, ...]) -> str:
    return f"{agg} by ({', '.join(by)})" if by else agg


def _select(sample: str, where: Where) -> str:
    matchers = ['run="$run"']
    for label, value in where.items():
        matchers.append(f'{label}="{value}"' if isinstance(value, str) else f'{label}=~"{"|".join(value)}"')
    return f"{sample}{{{','.join(matchers)}}}"


def _operand(query: Query) -> str:
    return f"({promql(query)})" if isinstance(query, Mean | Ratio | Difference) else promql(query)


def _matching(left: Query, right: Query) -> str:
    """One value for all: PromQL divides a vector by it with an empty ``on``."""
    return "on () group_left () " if labels_of(left) and not labels_of(right) else ""


def _check(metric: str, kinds: tuple[Kind, ...], by: tuple[str, ...], where: Where) -> None:
    spec = QUERYABLE.get(metric)
    if spec is None:
        raise ValueError(f"a query reads a metric of telemetry/catalogue.py, got {metric!r}; declare it there or correct the name")
    if spec.kind not in kinds:
        raise ValueError(f"this query reads a {' or '.join(kinds)}, got {metric}, a {spec.kind}; use the query of its kind")
    if spec.kind == "info":
        return
    for label in (*by, *where):
        if label not in spec.labels and label not in ("role", "actor"):
            raise ValueError(f"{metric} has the labels {', '.join((*spec.labels, 'role', 'actor'))}, got {label!r}; use one of these")
    for label, value in where.items():
        allowed = ROLES if label == "role" else spec.labels.get(label, ())
        for each in (value,) if isinstance(value, str) else value:
            if allowed and each not in allowed:
                raise ValueError(f"{label} of {metric} is one of {', '.join(allowed)}, got {each!r}; use one of these")


def _check_sum(metric: str, reads_sum: bool) -> None:
    """prometheus-client exports no ``_sum`` for a histogram whose first bucket is negative."""
    if reads_sum and CATALOGUE[metric].buckets[:1] < (0.0,):
        raise ValueError(f"{metric} has a negative bucket and so no sum on the page; take the mean from a gauge")


def _check_sides(left: Query, right: Query) -> None:
    if labels_of(right) not in ((), labels_of(left)):
        raise ValueError(f"both sides have the same labels, or the second has none, got {labels_of(left)} and {labels_of(right)}; give both the same `by`")

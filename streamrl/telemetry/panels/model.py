"""The nouns of the boards: a board has rows, a row has panels, a panel has targets, a target is a query and the name of its lines.

Guarantees: titles are unique on a board; a legend names labels that its query has. Knows nothing of Grafana's JSON, of pixels, or of how
a query is answered.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

import msgspec

from streamrl.telemetry.queries import QUERYABLE, Query, labels_of, metrics_of

PanelKind = Literal["timeseries", "stat", "heatmap", "table"]
PanelUnit = Literal[
    "none",  # a plain number
    "ratio",  # 0 to 1, shown as per cent
    "seconds",
    "bytes",
    "bytes_per_s",
    "per_s",
    "tokens_per_s",
    "trajectories_per_s",
    "groups_per_s",
    "tokens",
    "groups",
    "sessions",
    "versions",
    "nats",
]

_LABEL = re.compile(r"\{\{(\w+)\}\}")


class Target(msgspec.Struct, frozen=True):
    """One query and the name of its lines, with ``{{label}}`` for what differs: ``{{state}}``, ``p95``."""

    query: Query
    legend: str

    def __post_init__(self) -> None:
        unknown = set(legend_labels(self.legend)) - set(labels_of(self.query))
        if unknown:
            raise ValueError(f"a legend names labels of its query ({', '.join(labels_of(self.query)) or 'none'}), got {sorted(unknown)}; group by them")

    @property
    def has_number(self) -> bool:
        """False for an info metric, whose labels say everything and whose value is always 1: a table has no column for it."""
        return any(QUERYABLE[name].kind != "info" for name in metrics_of(self.query))


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """One chart. ``description`` says what is seen and what it means; the metrics' names are added by the reader from the targets."""

    title: str
    description: str
    unit: PanelUnit
    kind: PanelKind = "timeseries"
    targets: tuple[Target, ...]
    stacked: bool = False  # the lines add up to something: draw areas one on another
    minimum: float | None = None  # of the value axis; None: from the data
    maximum: float | None = None
    alarm_above: float | None = None  # a fault begins above this: a stat turns red, a chart draws a line
    smooth_s: int = 0  # the window of rates is at least this long: for what happens once a step. 0: as short as the scrapes allow
    may_be_empty: bool = False  # true only for what a healthy run may never do: a tool call, a failed load


class Row(msgspec.Struct, frozen=True):
    title: str
    panels: tuple[Panel, ...]


class Board(msgspec.Struct, frozen=True):
    """``uid`` is also the file's name: ``streamrl-overview``."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        titles = [panel.title for panel in self.panels()]
        twice = sorted({title for title in titles if titles.count(title) > 1})
        if twice:
            raise ValueError(f"titles of a board's panels are unique, got {', '.join(twice)} twice in {self.uid}; rename one")

    def panels(self) -> Iterator[Panel]:
        for row in self.rows:
            yield from row.panels


def legend_labels(legend: str) -> list[str]:
    """``{{env}} p95`` -> ``["env"]``."""
    return _LABEL.findall(legend)

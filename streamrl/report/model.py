"""What a report consists of, as plain data: charts, tables, bars and sample trajectories. Knows neither files nor HTML.

Numbers are in the unit that ``unit`` names (``PanelUnit``, plus "text" for ready words); who shows them chooses digits and prefixes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Number = float | None  # None: not measured
Axis = Literal["time", "step"]
ChartKind = Literal["lines", "stack", "heat"]
TokenRole = Literal["prompt", "model", "not trained", "observation"]


@dataclass(frozen=True)
class Line:
    """``values[i]`` is at place i of the chart's axis."""

    name: str
    values: list[Number]


@dataclass(frozen=True)
class Chart:
    """One picture. Of a heat chart each line is one bucket, lowest first, named by its range."""

    title: str
    unit: str
    lines: list[Line]
    axis: Axis = "time"
    kind: ChartKind = "lines"
    description: str = ""
    metrics: tuple[str, ...] = ()
    minimum: Number = None
    maximum: Number = None
    alarm_above: Number = None


@dataclass(frozen=True)
class Stat:
    """One big number; ``beside`` it stand what it is compared with, as ready words. ``trend`` is its way over time."""

    title: str
    unit: str
    value: Number | str
    beside: str = ""
    trend: list[Number] = field(default_factory=list)
    description: str = ""
    level: Literal["", "warn", "alarm"] = ""


@dataclass(frozen=True)
class Table:
    """``units[i]`` is that of column i ("text" for words). A cell that is None is shown as a dash."""

    title: str
    columns: list[str]
    units: list[str]
    rows: list[list[str | Number]]
    description: str = ""
    folded: bool = False  # shown on demand


@dataclass(frozen=True)
class Bars:
    """Rows of parts that add up: time by state per actor, tokens by fate. ``parts`` names the colours in their order."""

    title: str
    unit: str
    parts: list[str]
    rows: list[tuple[str, list[float]]]
    description: str = ""


@dataclass(frozen=True)
class Histogram:
    """Counts by bucket, lowest first."""

    title: str
    unit: str  # of the counts
    buckets: list[tuple[str, float]]
    description: str = ""


Block = Chart | Table | Bars | Histogram


@dataclass(frozen=True)
class Section:
    """A heading with what stands below it; neighbours of one ``group`` share a larger one. ``missing`` names what this run has no data for."""

    group: str
    title: str
    blocks: list[Block] = field(default_factory=list)
    stats: list[Stat] = field(default_factory=list)
    description: str = ""
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TokenSpan:
    """Neighbouring tokens of one role, as text."""

    role: TokenRole
    text: str
    num_tokens: int
    versions: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Trajectory:
    """One sampled row. ``reward`` is the sum over its tokens."""

    step: int
    key: str
    spans: list[TokenSpan]
    reward: Number


@dataclass(frozen=True)
class Samples:
    """``note`` says what is left out, or why ids stand for text."""

    trajectories: list[Trajectory] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True)
class Report:
    """The page from top to bottom. ``axes`` hold the places of all charts: the time since the start, and step numbers."""

    title: str
    status: str
    headline: str  # one sentence on how the run stands
    facts: list[Stat]
    notes: list[str]  # what went wrong, and what is missing
    sections: list[Section]
    axes: dict[Axis, list[float]]
    time_unit: str = "minutes"  # of the time axis, since the start
    steps: list[tuple[float, int]] = field(default_factory=list)  # (place on the time axis, step) of each step's end
    samples: Samples = field(default_factory=Samples)
    config_text: str = ""
    plan_text: str = ""
    written: str = ""  # when and from what

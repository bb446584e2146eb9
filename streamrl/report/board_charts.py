"""The dashboards' panels over a recording: the same list that Grafana draws, as charts of a report.

Guarantees: a panel is drawn when a line of it has a value, and named as missing otherwise; lines that are 0 throughout stand aside when others move
(their number is said); no line has more than ``downsample.MAX_POINTS`` points. Rates look back three scrapes, or as long as the panel asks,
but no more than a quarter of the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from streamrl.report.downsample import MAX_POINTS, Grid
from streamrl.report.model import Chart, Line, Number, Section, Stat, Table
from streamrl.report.units import shown
from streamrl.telemetry.catalogue import CATALOGUE
from streamrl.telemetry.evaluate import Series, Source, evaluate, scrape_interval_s
from streamrl.telemetry.panels import BOARDS, Board, Panel, Target, legend_labels
from streamrl.telemetry.queries import Query, Ratio, labels_of, metrics_of

WINDOW_SCRAPES = 3  # a rate needs two samples, and one scrape may be late
TREND_POINTS = 60
_TIME_UNITS = (("seconds", 1.0, 180.0), ("minutes", 60.0, 3 * 3600.0), ("hours", 3600.0, 4 * 86400.0), ("days", 86400.0, math.inf))  # name, size, up to
MAX_IDLE_LINES = 4  # a chart with more lines than this leaves out those that never move


@dataclass(frozen=True)
class TimeAxis:
    """The scrapes of a recording as the charts' common axis: time since ``start`` (unix seconds) in the unit that suits the run's length."""

    start: float
    unit: str
    unit_s: float
    grid: Grid
    trend: Grid

    @classmethod
    def of(cls, times: Sequence[float], start: float) -> TimeAxis:
        unit, unit_s = next((name, size_s) for name, size_s, up_to_s in _TIME_UNITS if (times[-1] - start if times else 0.0) < up_to_s)
        places = [(time - start) / unit_s for time in times]
        return cls(start, unit, unit_s, Grid(places), Grid(places, TREND_POINTS))

    def place(self, time: float) -> float:
        """Of a unix time."""
        return (time - self.start) / self.unit_s


def board_sections(recording: Source, axis: TimeAxis, boards: Iterable[Board] = BOARDS) -> list[Section]:
    """One section a row of a board."""
    return [_section(board, row.title, row.panels, recording, axis) for board in boards for row in board.rows]


def _section(board: Board, title: str, panels: Sequence[Panel], recording: Source, axis: TimeAxis) -> Section:
    stats, blocks, missing = [], [], []
    for panel in panels:
        drawn = draw(panel, recording, axis)
        if drawn is None:
            missing.append(panel.title)
        elif isinstance(drawn, Stat):
            stats.append(drawn)
        else:
            blocks.append(drawn)
    return Section(f"Board: {board.title.removeprefix('streamrl / ')}", title, list(blocks), stats, missing=missing)


def draw(panel: Panel, recording: Source, axis: TimeAxis) -> Chart | Stat | Table | None:
    """None when no target has a value anywhere."""
    found = [(target, evaluate(target.query, recording, window_s(panel, recording.times))) for target in panel.targets]
    found = [(target, sorted(filter(_has_value, lines), key=partial(_place, target.query))) for target, lines in found]
    if not any(lines for _, lines in found) or (panel.kind == "heatmap" and not any(_is_moving(series) for _, lines in found for series in lines)):
        return None
    if panel.kind == "stat":
        return _stat(panel, found, axis)
    if panel.kind == "table":
        return _table(panel, found)
    if panel.kind == "heatmap":
        return _heat(panel, [series for _, lines in found for series in lines], axis)
    return _lines(panel, found, axis)


def window_s(panel: Panel, times: Sequence[float]) -> float:
    """How far a rate of this panel looks back."""
    span = times[-1] - times[0] if times else 0.0
    least = max(WINDOW_SCRAPES * scrape_interval_s(times), 2 * span / MAX_POINTS)
    return max(least, min(panel.smooth_s, span / 4))


def _lines(panel: Panel, found: list[tuple[Target, list[Series]]], axis: TimeAxis) -> Chart:
    shorten = axis.grid.means if panel.stacked else axis.grid.extremes
    named = [(legend_of(target, series), series) for target, lines in found for series in lines]
    moving = [(name, series) for name, series in named if _is_moving(series)]
    idle, note = len(named) - len(moving), ""
    if idle and len(named) > MAX_IDLE_LINES:
        note = f" {idle} lines that are 0 throughout are left out." if idle > 1 else " A line that is 0 throughout is left out."
        named = moving or [(f"each of {idle}", named[0][1])]
    lines = [Line(name, shorten(series.values)) for name, series in named]
    return Chart(
        panel.title,
        panel.unit,
        lines,
        kind="stack" if panel.stacked else "lines",
        description=panel.description + note,
        metrics=_metrics(panel),
        minimum=panel.minimum,
        maximum=panel.maximum,
        alarm_above=panel.alarm_above,
    )


def _heat(panel: Panel, buckets: list[Series], axis: TimeAxis) -> Chart:
    """Buckets beyond the lowest and the highest one in use are left out."""
    names = bucket_names([series.labels["le"] for series in buckets], whole=panel.unit == "versions")
    used = [i for i, series in enumerate(buckets) if _is_moving(series)]
    lines = [Line(names[i], axis.grid.means(buckets[i].values)) for i in range(used[0], used[-1] + 1)]
    return Chart(panel.title, panel.unit, lines, kind="heat", description=panel.description, metrics=_metrics(panel))


def _stat(panel: Panel, found: list[tuple[Target, list[Series]]], axis: TimeAxis) -> Stat:
    """The first line's last value, and those of the others beside it."""
    named = [(legend_of(target, series), series) for target, lines in found for series in lines]
    first, value = named[0][1], _last(named[0][1])
    beside = ", ".join(f"{name} {shown(_last(series), panel.unit)}" for name, series in named[1:])
    alarm = value is not None and panel.alarm_above is not None and value > panel.alarm_above
    return Stat(panel.title, panel.unit, value, beside, axis.trend.extremes(first.values), panel.description, "alarm" if alarm else "")


def _table(panel: Panel, found: list[tuple[Target, list[Series]]]) -> Table:
    """One row a label set, one column a target that has a number; the last values."""
    labels = labels_of(panel.targets[0].query)
    numbers = [target for target, _ in found if target.has_number]
    rows: dict[tuple[str, ...], list[str | Number]] = {}
    for target, lines in found:
        for series in lines:
            row = rows.setdefault(tuple(series.labels.get(label, "") for label in labels), [None] * len(numbers))
            if target.has_number:
                row[numbers.index(target)] = _last(series)
    units: list[str] = ["ratio" if isinstance(target.query, Ratio) else panel.unit for target in numbers]
    return Table(
        panel.title,
        [*labels, *(target.legend for target in numbers)],
        [*("text" for _ in labels), *units],
        [[*key, *values] for key, values in sorted(rows.items())],
        panel.description,
    )


def legend_of(target: Target, series: Series) -> str:
    """``{{actor}} p95`` of this series: ``rollout-0 p95``."""
    text = target.legend
    for label in legend_labels(text):
        text = text.replace(f"{{{{{label}}}}}", series.labels.get(label) or "–")
    return text


def bucket_names(bounds: Sequence[str], *, whole: bool) -> list[str]:
    """Ranges of buckets given by their upper bounds.

    >>> bucket_names(["0.0", "1.0", "4.0", "+Inf"], whole=True), bucket_names(["0.1", "+Inf"], whole=False)
    (['0', '1', '2–4', '> 4'], ['≤ 0.1', '> 0.1'])
    """
    names, below = [], None
    for bound in map(float, bounds):
        if math.isinf(bound):
            names.append("all" if below is None else f"> {below:g}")
        elif not whole:
            names.append(f"≤ {bound:g}")
        else:
            lowest = bound if below is None else below + 1
            names.append(f"{bound:g}" if lowest >= bound else f"{lowest:g}–{bound:g}")
        below = bound
    return names


def _place(query: Query, series: Series) -> list[tuple[int, str | float]]:
    """Lines go in the order in which the catalogue declares their labels' values: states and phases as they follow one another, buckets ascending."""
    spec = CATALOGUE.get(next(metrics_of(query)))
    declared = spec.labels if spec is not None else {}
    key: list[tuple[int, str | float]] = []
    for label, value in series.labels.items():
        known = declared.get(label, ())
        key.append((1, float(value)) if label == "le" else (0, known.index(value)) if value in known else (2, value))
    return key


def _metrics(panel: Panel) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for target in panel.targets for name in metrics_of(target.query)))


def _has_value(series: Series) -> bool:
    return any(math.isfinite(value) for value in series.values)


def _is_moving(series: Series) -> bool:
    """Whether it is anything but 0 at some time."""
    return any(value and not math.isnan(value) for value in series.values)


def _last(series: Series) -> Number:
    return next((value for value in reversed(series.values) if math.isfinite(value)), None)

"""The step log as curves over steps, and every metric of it in one table. What a run without a recording has, too.

Takes the records that survive; of two that are left of one step (a validation that was done again) the later one counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from streamrl.report.downsample import Grid
from streamrl.report.model import Chart, Line, Number, Section, Table

Records = dict[int, dict[str, Any]]

# (title, unit, description, ((legend, field of the record or name in its metrics), ...))
_CURVES: tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Reward",
        "none",
        "Score of the batch's trajectories; val accuracy is that of greedy answers to held-out prompts.",
        (("mean", "reward"), ("val accuracy", "val_accuracy")),
    ),
    (
        "Reward, spread",
        "none",
        "Lowest, mean and highest score of a batch.",
        (("lowest", "critic/score/min"), ("mean", "critic/score/mean"), ("highest", "critic/score/max")),
    ),
    ("Lag", "versions", "Versions between the weights that wrote a trained group and the published ones.", (("mean", "lag_mean"), ("highest", "lag_max"))),
    ("Tokens generated", "tokens_per_s", "Response tokens, between the ends of two steps.", (("generated", "tokens_per_s"),)),
    ("Trajectories trained", "trajectories_per_s", "Between the ends of two steps.", (("trained", "trajectories_per_s"),)),
    ("Time of a step", "seconds", "The step's work, and the wait for its batch before it.", (("work", "step_s"), ("wait for data", "wait_data_s"))),
    (
        "Response length",
        "tokens",
        "Tokens of an answer.",
        (("shortest", "response_length/min"), ("mean", "response_length/mean"), ("longest", "response_length/max")),
    ),
    ("Policy loss", "none", "", (("loss", "actor/pg_loss"),)),
    ("Gradient norm", "none", "Before clipping.", (("norm", "actor/grad_norm"),)),
    ("Entropy", "nats", "Mean over tokens.", (("entropy", "actor/entropy"),)),
    ("KL", "nats", "Against the reference, and against the policy that sampled.", (("reference", "actor/kl_loss"), ("behaviour", "rollout_corr/kl"))),
    ("Clipped tokens", "ratio", "", (("clipped", "actor/pg_clipfrac"), ("clipped below", "actor/pg_clipfrac_lower"))),
    (
        "Importance weights",
        "ratio",
        "Effective sample size, and the share that was cut off.",
        (("effective", "rollout_corr/ess_ratio"), ("truncated", "rollout_corr/truncated_ratio")),
    ),
    ("Learning rate", "none", "", (("rate", "actor/lr"),)),
    (
        "Groups in the buffer",
        "groups",
        "At the end of each step.",
        (("pending", "pending"), ("running", "running"), ("ready", "ready"), ("leased", "leased")),
    ),
    ("Groups dropped", "groups", "Since the start.", (("dropped", "dropped"),)),
)
_ZERO_WHEN_LEFT_OUT = ("lag_mean", "lag_max", "pending", "running", "ready", "leased", "dropped", "wait_data_s")  # a record omits its zeros
_FROM_ZERO = ("versions", "tokens_per_s", "trajectories_per_s", "seconds", "tokens", "groups")
_STACKED = ("Time of a step", "Groups in the buffer")


def steps_section(records: Iterable[dict[str, Any]]) -> tuple[Section, list[float]]:
    """The charts over steps, and their axis."""
    by_step = merged(records)
    steps = sorted(by_step)
    grid = Grid(steps)
    charts, missing = [], []
    for title, unit, description, legends in _CURVES:
        lines = _lines(title, legends, by_step, steps, grid)
        if lines:
            kind = "stack" if title in _STACKED else "lines"
            metrics, least = tuple(name for _, name in legends if "/" in name), 0.0 if unit in _FROM_ZERO else None
            charts.append(Chart(title, unit, lines, "step", kind, description, metrics, least))  # type: ignore[arg-type]
        else:
            missing.append(title)
    table = _all_metrics([by_step[step] for step in steps])
    return Section("Steps", "Learning, step by step", [*charts, *([table] if table else [])], missing=missing if steps else []), grid.axis


def merged(records: Iterable[dict[str, Any]]) -> Records:
    """One record a step: a validation's record joins that of its step. Warnings are no step."""
    found: Records = {}
    for record in records:
        if record.get("warning") is None and isinstance(record.get("step"), int):
            earlier = found.get(record["step"], {})
            found[record["step"]] = {**earlier, **record, "metrics": {**_metrics(earlier), **_metrics(record)}}
    return found


def _lines(title: str, legends: tuple[tuple[str, str], ...], records: Records, steps: Sequence[int], grid: Grid) -> list[Line]:
    shorten = grid.means if title in _STACKED else grid.extremes
    lines = []
    for legend, name in legends:
        values = [value_of(records[step], name) for step in steps]
        if any(math.isfinite(value) for value in values):
            lines.append(Line(legend, shorten(values)))
    return lines


def value_of(record: dict[str, Any], name: str) -> float:
    """A field, or a metric of this name; nan when the record has neither."""
    value = record["metrics"].get(name) if "/" in name else record.get(name)
    if value is None and name in _ZERO_WHEN_LEFT_OUT and record.get("reward") is not None:
        return 0.0
    return float(value) if isinstance(value, int | float) else math.nan


def _all_metrics(records: list[dict[str, Any]]) -> Table | None:
    names = sorted({name for record in records for name in record["metrics"]})
    rows: list[list[str | Number]] = []
    for name in names:
        values = [value for record in records if math.isfinite(value := value_of(record, name) if "/" in name else _number(record["metrics"].get(name)))]
        if values:
            rows.append([name, values[0], values[-1], min(values), max(values), len(values)])
    if not rows:
        return None
    columns, units = ["metric", "first", "last", "lowest", "highest", "steps"], ["text"] + ["none"] * 5
    return Table("Every metric of the step log", columns, units, rows, "Names are verl's, so that curves can be compared.", folded=True)


def _metrics(record: dict[str, Any]) -> dict[str, Any]:
    metrics = record.get("metrics")
    return metrics if isinstance(metrics, dict) else {}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan

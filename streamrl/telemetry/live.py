"""What a person at the terminal reads: one line a step, one table at the end. Works on plain records; a missing value is left out."""

from __future__ import annotations

import io
from typing import Any

from streamrl.protocol.waits import one_line
from streamrl.telemetry.summary import RunSummary


def format_line(record: dict[str, Any]) -> str:
    """One step record as one line; a record of a validation as its own line.

    >>> format_line({"step": 7, "version": 6, "reward": 0.5, "lag_mean": 0.75, "lag_max": 1, "pending": 3, "running": 8, "ready": 2, "leased": 64})
    'step 7  version 6  reward 0.500  lag 0.75 mean 1 max  groups 3 pending 8 running 2 ready 64 leased'
    """
    parts = [f"step {record.get('step', 0)}", f"version {record.get('version', 0)}"]
    if record.get("reward") is not None:
        parts.append(f"reward {record['reward']:.3f}")
    if record.get("val_accuracy") is not None:
        parts.append(f"val accuracy {record['val_accuracy']:.3f}{_unscored(record)}")
    if record.get("trajectories_per_s"):
        parts.append(f"trained {record['trajectories_per_s']:.1f} traj/s")
    if record.get("tokens_per_s"):
        parts.append(f"generated {record['tokens_per_s']:.0f} tok/s")
    if record.get("reward") is not None:  # a training step; zeros are left out of its record and still mean zero
        parts.append(f"lag {record.get('lag_mean', 0):.2f} mean {record.get('lag_max', 0)} max")
        parts.append("groups " + " ".join(f"{record.get(state, 0)} {state}" for state in ("pending", "running", "ready", "leased")))
    if record.get("warning"):
        parts.append(f"WARNING: {one_line(record['warning'])}")
    if record.get("dropped"):
        parts.append(f"{record['dropped']} dropped")
    return "  ".join(parts)


def _unscored(record: dict[str, Any]) -> str:
    """Answers of a validation that got no score: the mean is of the others."""
    found = sum(value for name, value in (record.get("metrics") or {}).items() if name.startswith("val-aux/") and name.endswith("/failed_sessions"))
    return f" without {found:.0f} answers that failed" if found else ""


def format_summary(summary: RunSummary, width: int = 100) -> str:
    """A small table of the result."""
    from rich.console import Console  # only needed once, at the end of a run
    from rich.table import Table

    table = Table(title=f"run {summary.status}", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary_rows(summary):
        table.add_row(name, value)
    out = io.StringIO()
    Console(file=out, width=width, highlight=False, markup=False).print(table)
    return out.getvalue()


def summary_rows(summary: RunSummary) -> list[tuple[str, str]]:
    """(name, value) of each line of the table."""
    since = " since it was resumed" if summary.earlier_trajectories else ""
    rows = [
        ("steps", f"{summary.steps}{';' if since else ' in'} {summary.wall_s:.1f} s{since}, weight version {summary.weight_version}"),
        ("validation accuracy", _change(summary.val_accuracy_first, summary.val_accuracy_last)),
        ("reward", _change(summary.reward_first, summary.reward_last)),
        ("lag", f"{summary.lag_mean:.2f} mean, {summary.lag_max} max, bound {summary.max_staleness} version{'' if summary.max_staleness == 1 else 's'}"),
        ("trajectories", f"{summary.trajectories} ({summary.trajectories_per_s:.1f}/s{since})"),
        ("tokens", format_tokens(summary.token_fates, summary.unfinished)),
        ("groups", f"{summary.groups_trained} trained ({summary.partial_share:.1%} of them partial), {format_dropped(summary)}"),
        ("engine, seed", f"{summary.engine}, {summary.seed}"),
        ("folder", summary.run),
    ]
    return rows + ([("error", one_line(summary.error))] if summary.error else [])


def format_dropped(summary: RunSummary) -> str:
    """What became of the groups that were not trained."""
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(summary.groups_dropped.items()) if count) or "none"
    return f"dropped: {dropped}" + (f"; {summary.unfinished}: {summary.groups_left_over}" if summary.groups_left_over else "")


def format_tokens(fates: dict[str, int], unfinished: str = "in flight") -> str:
    """Where the tokens went that the policy wrote; what there is none of is left out. ``unfinished``: the word for those without an end.

    >>> format_tokens({"trained": 90, "stale": 6, "in_flight": 4})
    '100 generated: 90 trained, 6 stale, 4 in flight'
    """
    shown = ", ".join(f"{count} {unfinished if fate == 'in_flight' else fate}" for fate, count in fates.items() if count)
    return f"{sum(fates.values())} generated" + (f": {shown}" if shown else "")


def _change(first: float | None, last: float | None) -> str:
    if first is None or last is None:
        return "not measured"
    return f"{first:.3f} -> {last:.3f}"

"""How a run stands, in one word, one sentence and a few numbers: from its summary when it has ended, else from its last words and steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamrl.report.model import Number, Stat
from streamrl.report.tables import Untrained
from streamrl.report.units import duration, shown
from streamrl.telemetry.summary import RunStatus, RunSummary

SILENT_S = 10.0  # the driver writes every second; after this long without a word it hangs or is dead


def standing(summary: RunSummary | None, status: RunStatus | None, now: float) -> tuple[str, str]:
    """(word, sentence). The words: completed, stopped, failed, running, starting, stopping, silent, unknown."""
    if summary is not None:
        done = f"{summary.steps} steps in {duration(summary.wall_s)}, weight version {summary.weight_version}."
        return summary.status, f"{done} {summary.error}" if summary.error else done
    if status is None:
        return "unknown", "The driver has written no status: the run has not begun, or was made without one."
    progress = f"{status.progress}, weight version {status.version}"
    note = f"; {status.message}" if status.message else ""
    if now - status.updated > SILENT_S and status.state in ("starting", "running", "stopping"):
        silent = duration(now - status.updated)
        return "silent", f"No word from the driver (pid {status.pid}) for {silent}: it hangs or is dead. It was {status.state} at {progress}{note}."
    return status.state, f"{status.state} for {duration(status.updated - status.started)}, {progress}{note}."


def facts(summary: RunSummary | None, status: RunStatus | None, records: Sequence[dict[str, Any]], untrained: Untrained | None) -> list[Stat]:
    """The headline numbers. Without a summary they are those of the log of steps; what was never measured is left out."""
    found = _of_summary(summary, untrained or Untrained({}, 0.0)) if summary is not None else _of_steps(status, records, untrained)
    return [stat for stat in found if stat.value is not None]


def _of_summary(summary: RunSummary, untrained: Untrained) -> list[Stat]:
    level = "warn" if sum(untrained.dropped.values()) > summary.groups_trained else ""
    return [
        Stat("Steps", "none", summary.steps, f"weight version {summary.weight_version}"),
        Stat("Wall time", "seconds", summary.wall_s),
        Stat("Reward", "none", summary.reward_last, _from(summary.reward_first)),
        Stat("Validation accuracy", "ratio", summary.val_accuracy_last, _from(summary.val_accuracy_first, "ratio")),
        Stat("Generated", "tokens_per_s", summary.generated_tokens_per_s, f"{summary.generated_tokens:,} tokens, {summary.trained_tokens:,} trained"),
        Stat("Trajectories per second", "none", summary.trajectories_per_s, f"{summary.trajectories:,} in all"),
        Stat("Highest lag", "versions", summary.lag_max, f"mean {summary.lag_mean:.2f}, bound {summary.max_staleness}", level=_lag_level(summary)),
        Stat("Groups trained", "none", summary.groups_trained, untrained.words, level=level),  # type: ignore[arg-type]
    ]


def _of_steps(status: RunStatus | None, records: Sequence[dict[str, Any]], untrained: Untrained | None) -> list[Stat]:
    trained = [record for record in records if record.get("reward") is not None]
    rewards = [float(record["reward"]) for record in trained]
    accuracies = [float(record["val_accuracy"]) for record in records if record.get("val_accuracy") is not None]
    step = max([record.get("step", 0) for record in records] + ([status.step] if status is not None else []), default=None)
    dropped = sum(untrained.dropped.values()) if untrained is not None else trained[-1].get("dropped", 0) if trained else None
    of = f"of {status.total_steps}" if status is not None and status.total_steps else ""
    return [
        Stat("Steps", "none", step, of),
        Stat("Wall time", "seconds", status.updated - status.started if status is not None else None),
        Stat("Reward", "none", rewards[-1] if rewards else None, _from(rewards[0] if rewards else None)),
        Stat("Validation accuracy", "ratio", accuracies[-1] if accuracies else None, _from(accuracies[0] if accuracies else None, "ratio")),
        Stat("Generated", "tokens_per_s", _mean(record.get("tokens_per_s") for record in trained)),
        Stat("Trajectories per second", "none", _mean(record.get("trajectories_per_s") for record in trained)),
        Stat("Highest lag", "versions", max((record.get("lag_max", 0) for record in trained), default=None)),
        Stat("Groups dropped", "none", dropped),
    ]


def _from(first: Number, unit: str = "none") -> str:
    return f"from {shown(first, unit)}" if first is not None else ""


def _mean(values: Any) -> Number:
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _lag_level(summary: RunSummary) -> Any:
    return "alarm" if summary.lag_max > summary.max_staleness else ""

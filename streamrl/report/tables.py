"""What a recording adds up to over the whole run: time by state, token fates, ledger, drops, lags, slowest phases.

Each function gives None when the recording has nothing of it, so that old and short runs still make a report. Counters of an actor that was
restarted are added up over its lives; those of the replay buffer are taken as they stand, since it restores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from streamrl.report.board_charts import bucket_names
from streamrl.report.model import Bars, Histogram, Number, Table
from streamrl.telemetry.catalogue import CATALOGUE
from streamrl.telemetry.evaluate import Source, newest, totals
from streamrl.telemetry.queries import Where
from streamrl.telemetry.states import STATES
from streamrl.telemetry.summary import LEFT_OVER, SHUTDOWN, RunSummary

MAX_PHASES = 15
_FATES = ("trained", "stale", "filtered", "failed", "evaluation")
_IN_FLIGHT = ("pending", "running", "ready", "leased")
_LAGS: tuple[tuple[str, str, str, Where], ...] = (  # (title, unit, metric, where)
    ("Lag of trained groups", "groups", "streamrl_staleness_versions", {"stage": "train"}),
    ("Lag of trained tokens", "tokens", "streamrl_token_version_lag", {}),
    ("Versions in one trajectory", "trajectories", "streamrl_trajectory_versions_spanned", {}),
)
_PHASES: tuple[tuple[str, str, str | None], ...] = (  # (who, histogram, the label that names the phase)
    ("learner", "streamrl_learner_phase_seconds", "phase"),
    ("weights", "streamrl_weight_sync_seconds", "stage"),
    ("checkpoint", "streamrl_checkpoint_seconds", None),
    ("validation", "streamrl_eval_seconds", None),
    ("session", "streamrl_rollout_session_seconds", "env"),
    ("tool", "streamrl_tool_call_seconds", "tool"),
    ("admission", "streamrl_admission_wait_seconds", "reason"),
    ("data plane", "streamrl_dataplane_transfer_seconds", "direction"),
)


def time_by_state(recording: Source) -> Bars | None:
    """Each actor's seconds by state, in the states' order."""
    seconds = totals(recording, "streamrl_actor_time_seconds_total", ("actor", "state"))
    by_actor: dict[str, dict[str, float]] = {}
    for (actor, state), value in seconds.items():
        by_actor.setdefault(actor, {})[state] = value
    known = {state for states in by_actor.values() for state, value in states.items() if value > 0}
    parts = [state for state in STATES if state in known] + sorted(known - set(STATES))
    rows = [(actor, [states.get(state, 0.0) for state in parts]) for actor, states in sorted(by_actor.items())]
    if not parts:
        return None
    return Bars("Time by state", "seconds", parts, rows, "Every second of an actor belongs to one state. Up to the last scrape of the recording.")


def token_fates(recording: Source, summary: RunSummary | None = None) -> Bars | None:
    """What became of the tokens that the policy wrote; the parts add up to what was generated. The summary's account is later than the last scrape."""
    fates = {name: float(number) for name, number in summary.token_fates.items()} if summary is not None else {}
    fates = fates or _fates_so_far(recording)
    if not fates:
        return None
    unfinished = "in flight" if summary is None else summary.unfinished
    fates[unfinished] = fates.pop("in_flight", 0.0)
    known = (*_FATES, unfinished)
    parts = [*known, *sorted(fates.keys() - set(known))]
    row = [fates.get(part, 0.0) for part in parts]
    waste = 1.0 - sum(fates.get(part, 0.0) for part in ("trained", "evaluation", unfinished)) / max(sum(row), 1.0)
    when = "As of the last scrape: " if summary is None else ""
    note = f"{when}{sum(row):,.0f} tokens that the policy wrote, each in exactly one place; {100 * waste:.3g} % were of no use."
    return Bars("What became of the tokens", "tokens", parts, [("tokens", row)], note)


def _fates_so_far(recording: Source) -> dict[str, float]:
    fates = {labels[0]: value for labels, value in newest(recording, "streamrl_token_fate_total", ("fate",)).items()}
    if not fates:
        return {}
    trained = fates.get("trained", 0.0) - fates.pop("rolled_back", 0.0)
    return {**fates, "trained": trained, "in_flight": newest(recording, "streamrl_tokens_in_flight").get((), 0.0)}


def ledger(recording: Source) -> Table | None:
    """Admitted = trained + dropped + in flight, in three units; a rolled-back update counts as not trained."""
    rows: list[list[str | Number]] = []
    for unit in ("groups", "trajectories", "tokens"):
        fates = {labels[0]: value for labels, value in newest(recording, f"streamrl_ledger_{unit}_total", ("fate",)).items()}
        if fates:
            trained = fates.get("trained", 0.0) - fates.get("rolled_back", 0.0)
            admitted, dropped = fates.get("admitted", 0.0), fates.get("dropped", 0.0)
            rows.append([unit, admitted, trained, dropped, admitted - trained - dropped, fates.get("rolled_back", 0.0)])
    if not rows:
        return None
    columns = ["unit", "admitted", "trained", "dropped", "in flight", "rolled back"]
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    left = newest(recording, "streamrl_groups_dropped_total", (), {"reason": SHUTDOWN}).get((), 0.0)
    dropped_too = f"Dropped counts the {left:,.0f} groups {LEFT_OVER}. " if left else ""
    note = f"As of the newest recorded second. In flight is what is left: admitted - trained - dropped. {dropped_too}{_balance(recording)}"
    note += "`streamrl audit` proves it from the journal."
    return Table("Ledger", columns, ["text", *["none"] * (len(columns) - 1)], rows, note)


def _balance(recording: Source) -> str:
    fates = {labels[0]: value for labels, value in newest(recording, "streamrl_ledger_groups_total", ("fate",)).items()}
    left = fates.get("admitted", 0.0) - fates.get("trained", 0.0) + fates.get("rolled_back", 0.0) - fates.get("dropped", 0.0)
    held = newest(recording, "streamrl_buffer_groups", (), {"state": _IN_FLIGHT}).get(())
    if held is None:
        return ""
    return f"The buffer held {held:,.0f} then, so it closes. " if held == left else f"The buffer holds {held:,.0f}: IT DOES NOT CLOSE. "


class Untrained(NamedTuple):
    """Groups that were admitted and ended without being trained. ``left_over``: unfinished when the run ended, which is not counted as dropped."""

    dropped: dict[str, float]  # by reason, those with none left out
    left_over: float

    @property
    def words(self) -> str:
        """``14 dropped, 24 left over at the end``."""
        return f"{sum(self.dropped.values()):,.0f} dropped" + (f", {self.left_over:,.0f} {LEFT_OVER}" if self.left_over else "")


def untrained(recording: Source, summary: RunSummary | None) -> Untrained | None:
    """The one source of all numbers of dropped groups. The last scrape may be from before the end, the summary from before the last groups were let go."""
    counts = {labels[0]: value for labels, value in newest(recording, "streamrl_groups_dropped_total", ("reason",)).items()}
    if not counts and summary is None:
        return None
    at_the_end = {} if summary is None else {**summary.groups_dropped, SHUTDOWN: summary.groups_left_over if summary.unfinished == LEFT_OVER else 0}
    counts |= {reason: max(float(count), counts.get(reason, 0.0)) for reason, count in at_the_end.items()}
    left_over = counts.pop(SHUTDOWN, 0.0)
    return Untrained({reason: count for reason, count in counts.items() if count}, left_over)


def drops(found: Untrained | None) -> Histogram | None:
    """Groups by the reason they were dropped for."""
    if found is None:
        return None
    none = "" if found.dropped else "No group was dropped. "
    note = none + (f"{found.left_over:,.0f} groups were {LEFT_OVER}, which is none of these." if found.left_over else "")
    return Histogram("Dropped groups by reason", "groups", sorted(found.dropped.items(), key=lambda item: -item[1]), note)


def lags(recording: Source) -> list[Histogram]:
    """How old what was trained was, over the whole run."""
    found = []
    for title, unit, metric, where in _LAGS:
        counts = bucket_counts(recording, metric, where)
        if counts and sum(count for _, count in counts):
            found.append(Histogram(title, unit, _in_use(_named(counts)), f"{CATALOGUE[metric].help}. As measured then: what was rolled back later is in it."))
    return found


def bucket_counts(recording: Source, metric: str, where: Where | None = None) -> list[tuple[float, float]]:
    """(upper bound, observations in this bucket), ascending."""
    cumulative = {float(labels[0]): value for labels, value in totals(recording, f"{metric}_bucket", ("le",), where).items()}
    counts, below = [], 0.0
    for bound in sorted(cumulative):
        counts.append((bound, max(0.0, cumulative[bound] - below)))
        below = cumulative[bound]
    return counts


def quantile(counts: Sequence[tuple[float, float]], q: float) -> Number:
    """Interpolated in its bucket; beyond the last finite bound it is that bound.

    >>> quantile([(1.0, 50.0), (3.0, 50.0), (float("inf"), 0.0)], 0.75)
    2.0
    """
    total, seen, start = sum(count for _, count in counts), 0.0, 0.0
    for bound, count in counts:
        if count and seen + count >= q * total:
            return start if bound == float("inf") else start + (bound - start) * (q * total - seen) / count
        seen, start = seen + count, bound
    return None


def slowest_phases(recording: Source) -> Table | None:
    """Where the seconds went, the largest total first."""
    rows: list[list[str | Number]] = []
    for who, metric, label in _PHASES:
        by = (label,) if label else ()
        seconds, times = totals(recording, f"{metric}_sum", by), totals(recording, f"{metric}_count", by)
        for labels, total in seconds.items():
            if times.get(labels):
                counts = bucket_counts(recording, metric, {label: labels[0]} if label else {})
                rows.append([who, labels[0] if label else "", times[labels], total, total / times[labels], quantile(counts, 0.95)])
    if not rows:
        return None
    rows.sort(key=lambda row: -float(row[3] or 0))
    columns = ["of", "phase", "times", "total", "mean", "p95"]
    more = f" {len(rows) - MAX_PHASES} shorter ones are left out." if len(rows) > MAX_PHASES else ""
    note = f"Sessions and transfers run side by side, so their totals may exceed the wall time. p95 is interpolated in its bucket.{more}"
    return Table("Slowest phases", columns, ["text", "text", "none", "seconds", "seconds", "seconds"], rows[:MAX_PHASES], note)


def _named(counts: Sequence[tuple[float, float]]) -> list[tuple[str, float]]:
    names = bucket_names([str(bound) for bound, _ in counts], whole=True)
    return [(name, count) for name, (_, count) in zip(names, counts, strict=True)]


def _in_use(counts: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """From the lowest bucket to the highest one that holds something."""
    last = max((place for place, (_, count) in enumerate(counts) if count), default=0)
    return counts[: last + 1]


def quarantine(lines: Iterable[dict[str, object]], shown: int = 20) -> Table | None:
    """The prompts that failed too often: one row each, the first ``shown`` of them."""
    entries = list(lines)
    if not entries:
        return None
    columns = list(dict.fromkeys(name for entry in entries for name in entry))[:6]
    rows: list[list[str | Number]] = [[_cell(entry.get(name)) for name in columns] for entry in entries[:shown]]
    more = f" The first {shown} are listed." if len(entries) > shown else ""
    return Table("Quarantined prompts", columns, ["text"] * len(columns), rows, f"{len(entries)} prompts failed too often and are not tried again.{more}")


def _cell(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= 120 else text[:117] + "..."

"""What one frame of ``streamrl top`` says, as plain values: from the last minute of metrics and the files of the run folder. Draws nothing.

A number that nobody has told yet is None, and an actor that does not answer keeps its line as long as it is a target of the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streamrl.diagnosis import RunView, diagnose, read_view
from streamrl.errors import StreamrlError
from streamrl.telemetry.catalogue import ROLES
from streamrl.telemetry.evaluate import evaluate, newest
from streamrl.telemetry.log_tail import Complaint, newest_complaints
from streamrl.telemetry.queries import Latest, Query, Rate, Ratio
from streamrl.telemetry.run_folder import read_json
from streamrl.telemetry.steps import read_last_step
from streamrl.telemetry.summary import RunStatus, RunSummary, read_status, read_summary

if TYPE_CHECKING:
    from streamrl.telemetry.recording import Recording
    from streamrl.telemetry.run_folder import RunFolder

SHARES_S = 10.0  # what an actor does
RATES_S = 60.0  # throughput: sessions and steps come in bursts
NUM_COMPLAINTS = 4
GROUP_STATES = ("pending", "running", "ready", "leased")


@dataclass(frozen=True)
class ActorRow:
    """One actor. ``shares`` of its time by state, largest first, empty when not known; ``wait``: its oldest one, as words."""

    name: str
    role: str
    is_up: bool
    shares: tuple[tuple[str, float], ...] = ()
    version: int | None = None
    sessions: str = ""
    wait: str = ""


@dataclass(frozen=True)
class Snapshot:
    """The run at ``now``. ``metrics_age_s``: of the newest scrape; None: there is none. ``is_live``: it came from the pages themselves."""

    run: str
    now: float
    is_live: bool
    metrics_age_s: float | None
    view: RunView  # the files of the folder
    summary: RunSummary | None
    step: dict[str, Any] | None  # the last training step, as in metrics/steps.jsonl
    actors: tuple[ActorRow, ...]
    rates: dict[str, float] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    capacity_groups: int | None = None
    store_ratio: float | None = None
    bound: int | None = None
    violations: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    blocked: tuple[str, ...] = ()
    headline: str = ""
    complaints: tuple[Complaint, ...] = ()

    @property
    def status(self) -> RunStatus | None:
        """The driver's last word about itself."""
        return self.view.status

    @property
    def has_ended(self) -> bool:
        return self.summary is not None or self.view.is_interrupted


def snapshot(folder: RunFolder, recording: Recording, is_live: bool, now: float) -> Snapshot:
    """Everything that a frame shows."""
    read_status(folder.status)  # one that cannot be read is refused; a view has none then
    view, waits = read_view(folder, now), _waits(folder)
    bounds = [value for value in _last(Latest("streamrl_staleness_bound_versions", "max"), recording).values() if value is not None]
    capacity = _last(Latest("streamrl_buffer_capacity_groups"), recording).get(())
    return Snapshot(
        run=folder.root.name,
        now=now,
        is_live=is_live,
        metrics_age_s=now - recording.times[-1] if recording.times else None,
        view=view,
        summary=read_summary(folder.summary),
        step=read_last_step(folder.steps),
        actors=tuple(_actors(recording, waits)),
        rates=_rates(recording),
        groups={state: int(count) for (state,), count in _last(Latest("streamrl_buffer_groups", by=("state",)), recording).items()},
        capacity_groups=None if capacity is None else int(capacity),
        store_ratio=_last(Ratio(Latest("streamrl_buffer_bytes"), Latest("streamrl_buffer_capacity_bytes")), recording).get(()),
        bound=int(bounds[0]) if bounds else None,
        violations=int(sum(newest(recording, "streamrl_staleness_violations_total").values())),
        dropped={reason: int(count) for (reason,), count in newest(recording, "streamrl_groups_dropped_total", by=("reason",)).items() if count},
        blocked=tuple(reason for (reason,), flag in _last(Latest("streamrl_admission_blocked", by=("reason",)), recording).items() if flag),
        headline=diagnose(view).headline,  # what ``streamrl why`` begins with
        complaints=tuple(newest_complaints(folder.logs, NUM_COMPLAINTS)),
    )


def _last(query: Query, recording: Recording, window_s: float = SHARES_S) -> dict[tuple[str, ...], float]:
    """The newest value of each series that has one now."""
    found = evaluate(query, recording, window_s) if recording.times else []
    return {tuple(one.labels.values()): one.values[-1] for one in found if not math.isnan(one.values[-1])}


def _rates(recording: Recording) -> dict[str, float]:
    queries = {
        "generated tokens": Rate("streamrl_rollout_tokens_total", where={"kind": "completion"}),
        "trajectories": Rate("streamrl_rollout_trajectories_total"),
        "trained tokens": Rate("streamrl_learner_tokens_total"),
        "steps": Rate("streamrl_learner_steps_total"),
    }
    return {name: value for name, query in queries.items() for value in _last(query, recording, RATES_S).values()}


def _actors(recording: Recording, waits: dict[str, str]) -> Iterator[ActorRow]:
    """Who is a target now, in the order of a row's way through the run."""
    up = _last(Latest("up", "max", by=("role", "actor")), recording)
    seconds = _last(Rate("streamrl_actor_time_seconds_total", by=("actor", "state")), recording)
    versions = _last(Latest("streamrl_weight_version", "max", by=("actor",)), recording)
    running = _last(Latest("streamrl_rollout_sessions_in_flight", by=("actor",)), recording)
    slots = _last(Latest("streamrl_rollout_session_capacity", by=("actor",)), recording)
    for role, actor in sorted(up, key=lambda key: (_order(key[0]), key[1])):
        own = {state: value for (name, state), value in seconds.items() if name == actor and value > 0}
        total = sum(own.values())
        shares = sorted(((state, value / total) for state, value in own.items()), key=lambda share: -share[1])
        version = versions.get((actor,))
        sessions = f"{running[actor,]:.0f}/{slots[actor,]:.0f} sessions" if (actor,) in running and (actor,) in slots else ""
        is_up = up[role, actor] > 0
        yield ActorRow(actor, role, is_up, tuple(shares) if is_up else (), None if version is None else int(version), sessions, waits.get(actor, ""))


def _order(role: str) -> int:
    return ROLES.index(role) if role in ROLES else len(ROLES)


def _waits(folder: RunFolder) -> dict[str, str]:
    """The oldest wait of each actor, in words, by its age when the driver last asked; of a file of another version what can be read."""
    try:
        table = read_json(folder.waits)
        return {name: words for name, health in table["actors"].items() if health and (words := oldest_wait(health, table["time"]))}
    except (StreamrlError, TypeError, KeyError, AttributeError):
        return {}


def oldest_wait(health: dict[str, Any], time: float) -> str:
    """What an actor has waited for longest, as of ``time``.

    >>> oldest_wait({"waits": [{"what": "a batch", "on": "replay", "since": 90.0}]}, 102.0)
    '12 s for a batch of replay'
    """
    rows = health.get("waits") or []
    oldest = min(rows, key=lambda row: row["since"], default=None)
    return f"{max(0.0, time - oldest['since']):.0f} s for {oldest['what']} of {oldest['on']}" if oldest else ""

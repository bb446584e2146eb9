"""When the driver says by itself what is wrong: once when it gets so, and again at intervals while it stays so.

Says nothing while the run goes on, however slow it is: a passed deadline alone is looked at, and only told when the diagnosis finds more than a bottleneck.
Calls that each end by their time-out never wait for long: what the run waits for is told when the newest call of it has failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from streamrl.diagnosis.diagnose import OVERDUE_S, diagnose
from streamrl.diagnosis.result import Diagnosis
from streamrl.diagnosis.roots import LIMIT_KEYS, kind_of
from streamrl.diagnosis.view import RunView

REPEAT_S = 300.0  # before the same is said again
SETTLE_S = 5.0  # so long an alarm must hold: a call that is refused is often answered a moment later


class Alarm(NamedTuple):
    """What to say. ``stalled``: nothing got done for so long that the stacks of all actors are worth keeping."""

    diagnosis: Diagnosis
    stalled: bool


class Lookout:
    """Looks at one view after another. ``newest`` is the last diagnosis, said or not; ``standing`` the alarm that holds now, None when there is none."""

    def __init__(self, settle_s: float = SETTLE_S, repeat_s: float = REPEAT_S) -> None:
        self._settle_s, self._repeat_s = settle_s, repeat_s
        self._culprit, self._since = "", 0.0
        self._said: dict[tuple[str, str], float] = {}  # (culprit, verdict) -> when
        self._overdue: set[tuple[str, str, str, float]] = set()
        self.newest: Diagnosis | None = None
        self.standing: Diagnosis | None = None

    def look(self, view: RunView) -> Alarm | None:
        """An alarm that is due now."""
        found = self.newest = diagnose(view)
        at_once = (self._newly_overdue(view) and found.verdict == "waiting") or waits_for_failing(view, found)
        if not found.is_alarm and not at_once:
            self._culprit, self.standing = "", None
            return None
        if found.culprit != self._culprit:
            self._culprit, self._since, self.standing = found.culprit, view.now, None
        if not at_once and view.now - self._since < self._settle_s:
            return None
        self.standing = found if found.is_alarm else None
        if view.now - self._said.get((found.culprit, found.verdict), -self._repeat_s) < self._repeat_s:
            return None
        self._said[found.culprit, found.verdict] = view.now
        idle_s = view.idle_s()
        return Alarm(found, idle_s is not None and idle_s > view.table.stall_s)

    def _newly_overdue(self, view: RunView) -> bool:
        """Whether a deadline has passed that had not at the last look."""
        overdue = set(overdue_waits(view))
        fresh, self._overdue = overdue - self._overdue, overdue
        return bool(fresh)


def waits_for_failing(view: RunView, found: Diagnosis) -> bool:
    """Whether the run waits for a callee whose newest call has failed. A tool's failure is an answer for the model."""
    if found.verdict not in ("waiting", "stuck") or not found.suspects:
        return False
    actor = found.suspects[0]
    on = found.culprit.removeprefix(f"{actor} ")  # "rollout-0 engine" is the engine of its calls
    calls = view.calls(actor, on)
    kind, _ = kind_of(on)
    return calls is not None and calls.failures > 0 and kind in LIMIT_KEYS and kind != "tool"


def overdue_waits(view: RunView) -> Iterator[tuple[str, str, str, float]]:
    """Waits whose deadline has passed, with their start."""
    for name in view.table.actors:
        for wait in view.waits(name):
            if wait.limit_s is not None and view.age(name, wait.since) > wait.limit_s + OVERDUE_S:
                yield name, wait.what, wait.on, wait.since

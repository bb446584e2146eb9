"""From a view of a run to a diagnosis: walk from the trainer to the root, then judge.

    trainer ──a batch──► replay ──group p7──► rollout-1 ──its end──► session p7/2 ──a call──► tool search

The victim is where the walk begins; the culprit is where it ends: something that waits for nobody, is dead, hung or failing. Slow and stuck differ by
progress: what gets things done is the bottleneck, and nothing is wrong.
"""

from __future__ import annotations

from streamrl.diagnosis import sources
from streamrl.diagnosis.result import Diagnosis, Link, Verdict, span
from streamrl.diagnosis.roots import SILENT_S, STACKS, Root, failing, unresponsive
from streamrl.diagnosis.view import RunView

SKEW_S = 5.0  # between two clocks, before it is worth a word
DRIVER_S = 20.0  # the driver writes every second, but where an actor that it asks lets it wait
OVERDUE_S = 2.0  # after a deadline, for whoever keeps it to act
QUIET_SHARE = 0.1  # of stall_s: nothing got done for a moment that is worth a word
OPAQUE_S = 5.0  # the same where nothing tells whether it works: a tool, a scorer, code of the user's


def diagnose(view: RunView) -> Diagnosis:
    """Who keeps the run from going on."""
    if view.summary is not None:
        return _ended(view)
    if view.status is None:
        return Diagnosis("starting", "the driver has written nothing yet", "driver", next_step="see logs/driver.log")
    is_watched = view.table.time >= view.status.started and "trainer" in view.table.actors  # an earlier life of the run may have left a table
    if (gone := _driver(view, is_watched)) is not None:
        return gone
    if not is_watched:
        seconds = span(view.now - view.status.started)
        return Diagnosis(
            "starting", f"the run is {view.status.state} for {seconds}; its actors are being opened", next_step="see logs/ for how far each of them is"
        )
    chain: list[Link] = []
    root = sources.trainer(view, chain)
    return _judged(view, root, tuple(chain))


def _ended(view: RunView) -> Diagnosis:
    assert view.summary is not None
    error = f": {view.summary.error}" if view.summary.error else ""
    step = f"go on with: streamrl launch --resume {view.folder}" if view.summary.status != "completed" else ""
    return Diagnosis("ended", f"the run has {_past(view.summary.status)} after {view.summary.steps} steps{error}", next_step=step)


def _past(status: str) -> str:
    return {"completed": "ended", "stopped": "been stopped", "failed": "failed"}.get(status, status)


def _driver(view: RunView, is_watched: bool) -> Diagnosis | None:
    """The driver itself, which all the others depend on. While it opens the actors it writes nothing."""
    assert view.status is not None
    silent_s, pid = view.now - view.status.updated, view.status.pid
    if view.driver == "gone":
        return Diagnosis(
            "stuck",
            f"driver (pid {pid}) is dead: its last word came {span(silent_s)} ago, and it left no summary",
            "driver",
            next_step=f"see logs/driver.log; go on with: streamrl launch --resume {view.folder}",
        )
    if not is_watched or silent_s <= (SILENT_S if view.driver == "stopped" else DRIVER_S):
        return None
    if view.driver == "stopped":
        return Diagnosis(
            "stuck", f"driver (pid {pid}) is stopped by a signal since {span(silent_s)}", "driver", next_step=f"let it go on with: kill -CONT {pid}"
        )
    return Diagnosis("stuck", f"driver (pid {pid}) lives and has written nothing for {span(silent_s)}", "driver", next_step=STACKS, suspects=("driver",))


def _judged(view: RunView, root: Root, chain: tuple[Link, ...]) -> Diagnosis:
    """The verdict, and what else there is to say."""
    verdict, why = _verdict(view, root, chain)
    evidence = [*root.evidence, *why, *_asides(view, root)]
    blame = f"{root.culprit} {root.says}"
    if verdict == "fine":
        headline, step = f"the run goes on; the slowest part is {root.culprit}: it {root.says}", "nothing is wrong"
    elif verdict == "waiting":
        headline, step = f"waiting: {blame}", root.next_step
    else:
        headline, step = blame, root.next_step
    return Diagnosis(verdict, headline, root.culprit, chain, step, tuple(evidence), (root.actor,) if root.actor else ())


def _verdict(view: RunView, root: Root, chain: tuple[Link, ...]) -> tuple[Verdict, list[str]]:
    stall_s, idle_s = view.table.stall_s, view.idle_s()
    why = [f"the last step or session ended {span(idle_s)} ago"] if idle_s is not None else []
    if root.certain:
        return "stuck", why
    overdue = next((link for link in chain if link.left_s is not None and link.left_s < -OVERDUE_S), None)
    if overdue is not None:
        return "stuck", [*why, f"the deadline of {overdue.waiter} for {overdue.what} passed {span(-(overdue.left_s or 0.0))} ago"]
    if root.quiet_s > stall_s and (idle_s is None or idle_s > stall_s):
        return "stuck", [*why, f"no step and no session has ended for more than telemetry.stall_s={stall_s:g} s"]
    moment_s = QUIET_SHARE * stall_s if root.works else min(OPAQUE_S, QUIET_SHARE * stall_s)
    return ("waiting" if root.quiet_s > moment_s else "fine"), why


def _asides(view: RunView, root: Root) -> list[str]:
    """What is not in order beside the chain."""
    found = []
    for name in view.table.actors:
        other = unresponsive(view, name)
        if other is not None and name != root.culprit:
            found.append(f"also: {other.culprit} {other.says}")
        if abs(view.offset_s(name)) > SKEW_S:
            way = "ahead of" if view.offset_s(name) > 0 else "behind"
            found.append(f"the clock of {name} is {span(abs(view.offset_s(name)))} {way} the driver's; the times here allow for that")
    broken = failing(view, view.names("rollout"))
    if broken is not None and broken.culprit != root.culprit:
        found.append(f"also: {broken.culprit} {broken.says}")
    return found

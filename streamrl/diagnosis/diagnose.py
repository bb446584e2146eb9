"""From a view of a run to a diagnosis: walk from the trainer to the root, then judge.

    trainer ──a batch──► replay ──group p7──► rollout-1 ──its end──► session p7/2 ──a call──► tool search

The victim is where the walk begins; the culprit is where it ends: something that waits for nobody, is dead, hung or failing. Slow and stuck differ by
progress: what gets things done is the bottleneck, and nothing is wrong.
"""

from __future__ import annotations

import shlex

import msgspec

from streamrl.diagnosis import needed, sources
from streamrl.diagnosis.driver import ENDED_AT_ONCE, LOST_SINCE
from streamrl.diagnosis.result import Diagnosis, Link, Verdict, span
from streamrl.diagnosis.roots import COMMAND, STACKS, Root, failing, unresponsive
from streamrl.diagnosis.view import MISSING, RunView
from streamrl.protocol.waits import one_line

SKEW_S = 5.0  # between two clocks, before it is worth a word
STOPPED_S = 3.0  # the driver writes every second
DRIVER_S = 20.0  # the same of one that lives: an actor that it asks may let it wait
OVERDUE_S = 2.0  # after a deadline, for whoever keeps it to act
QUIET_SHARE = 0.1  # of stall_s: nothing got done for a moment that is worth a word
OPAQUE_S = 5.0  # the same where nothing tells whether it works: a tool, a scorer, code of the user's
BRIEF_S = 1.0  # what is quiet for less is named without saying for how long


ERROR_CHARS = 600  # of the one that ended the run: it is all that is left to say


def diagnose(view: RunView) -> Diagnosis:
    """Who keeps the run from going on."""
    found = _diagnosed(view)
    command = COMMAND.replace("RUN", shlex.quote(view.folder))
    return msgspec.structs.replace(found, next_step=found.next_step.replace(COMMAND, command)) if view.folder else found


def _diagnosed(view: RunView) -> Diagnosis:
    if view.has_ended:
        return _ended(view)
    if (lost := _lost(view, "summary.json") or _lost(view, "status.json")) is not None:
        return lost
    if view.status is None:
        return Diagnosis("starting", "the driver has written nothing yet", "driver", next_step="see logs/driver.log")
    if (gone := _driver(view)) is not None:
        return gone
    if not view.is_watched:
        return _lost(view, "waits.json") or _starting(view)
    chain: list[Link] = []
    root = needed.culprit(view, sources.trainer(view, chain))
    return _judged(view, root, tuple(chain))


def _ended(view: RunView) -> Diagnosis:
    if view.summary is None:
        return Diagnosis("ended", f"the run was {ENDED_AT_ONCE}: {LOST_SINCE}", next_step=_going_on(view))
    error = view.summary.error or ""
    step = "" if view.summary.status == "completed" else _going_on(view)
    if step and "; " in error:  # an error says the rule, what was found, and behind the semicolon what to do
        step = f"do what the error says, then {step}"
    headline = f"the run has {_past(view.summary.status)} after {view.summary.steps} steps" + (f": {one_line(error, ERROR_CHARS)}" if error else "")
    return Diagnosis("ended", headline, next_step=step)


def _past(status: str) -> str:
    return {"completed": "ended", "stopped": "been stopped", "failed": "failed"}.get(status, status)


def _going_on(view: RunView) -> str:
    """What to type for a run without a driver, and where its training begins then."""
    if view.checkpoint is None and not view.has_journal:
        return "launch it anew in another folder: it has left neither a checkpoint nor a journal to go on from"
    begins = "there is no checkpoint, so training begins again at step 0" if view.checkpoint is None else f"from its checkpoint of step {view.checkpoint}"
    return f"go on with: streamrl launch --resume {shlex.quote(view.folder)} ({begins})"


def _lost(view: RunView, name: str) -> Diagnosis | None:
    """A file that would tell is there and cannot be read, or is missing though the driver has been training."""
    lack, has_trained = view.lacks.get(name), view.step is not None and (view.status is None or view.status.step > 0)
    if lack is None or (lack == MISSING and not has_trained):
        return None
    though = f", though metrics/steps.jsonl is at step {view.step}" if has_trained else ""
    headline = f"{name} {lack}{though}: nothing tells how the run is"
    step = "ask again in a moment: a driver that lives writes it every second; if it stays so, see logs/driver.log"
    if lack != MISSING:
        step += ", and whether this is the version of streamrl that wrote it"
    if view.status is None:
        step += f", and once no driver runs, {_going_on(view)}"
    return Diagnosis("unknown", headline, next_step=step)


def _starting(view: RunView) -> Diagnosis:
    """No actor has been asked yet. Those on record have begun."""
    assert view.status is not None
    began = f"the run began {span(max(0.0, view.now - view.status.started))} ago"
    names = ", ".join(view.processes)
    if names:
        return Diagnosis("starting", f"{began}, and its actors are being opened; begun so far: {names}", next_step="see logs/<actor>.log for how far each is")
    what = "its cluster is being started or joined" if view.status.state == "starting" else "its actors are being started"
    return Diagnosis("starting", f"{began}, and {what}", next_step="see logs/driver.log")


def _driver(view: RunView) -> Diagnosis | None:
    """The driver itself, which all the others depend on. While it opens the actors it writes nothing."""
    assert view.status is not None
    silent_s, pid = view.now - view.status.updated, view.status.pid
    if view.driver == "gone":
        return Diagnosis(
            "stuck",
            f"driver (pid {pid}) is dead: its last word came {span(silent_s)} ago, and it left no summary",
            "driver",
            next_step=f"see logs/driver.log; {_going_on(view)}",
        )
    if view.driver == "stopped" and silent_s > STOPPED_S:
        headline, step = f"driver (pid {pid}) is stopped by a signal and has written nothing for {span(silent_s)}", f"let it go on with: kill -CONT {pid}"
        return Diagnosis("stuck", headline, "driver", next_step=step, evidence=_meanwhile(view) if view.is_watched else (), suspects=("driver",))
    if not view.is_watched or view.driver == "stopped" or silent_s <= DRIVER_S:
        return None
    lives = "lives and " if view.driver == "running" else ""
    return Diagnosis("stuck", f"driver (pid {pid}) {lives}has written nothing for {span(silent_s)}", "driver", next_step=STACKS, suspects=("driver",))


def _meanwhile(view: RunView) -> tuple[str, ...]:
    """What the actors do while the driver is stopped: it only looks after them."""
    stopped = [name for name in view.processes if view.state_of(name) in ("stopped", "gone")]
    if stopped:
        return (f"of its actors {', '.join(stopped)} {'is' if len(stopped) == 1 else 'are'} stopped or gone as well",)
    chain: list[Link] = []
    root = sources.trainer(view, chain)
    trains = _verdict(view, root, tuple(chain))[0] in ("fine", "waiting")
    how, last = ("go on training", "the run went on") if trains else ("go on", root.blame)
    return (
        f"the actors are processes of their own and {how} meanwhile, until they need the driver: to replace one that dies, and at the end of the run",
        f"when it last asked them, {last}; what they have done since is on record once it goes on",
    )


def _judged(view: RunView, root: Root, chain: tuple[Link, ...]) -> Diagnosis:
    """The verdict, and what else there is to say."""
    verdict, why = _verdict(view, root, chain)
    evidence = [*root.evidence, *why, *_asides(view, root)]
    if verdict == "fine":
        does = f": it {root.says}" if root.quiet_s >= BRIEF_S else ""
        headline, step = f"the run goes on; the slowest part is {root.subject}{does}", "nothing is wrong"
    elif verdict == "waiting":
        headline, step = f"waiting: {root.blame}", root.next_step
    else:
        headline, step = root.blame, root.next_step
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
    return ("waiting" if root.down or root.quiet_s > moment_s else "fine"), why


def _asides(view: RunView, root: Root) -> list[str]:
    """What is not in order beside the chain."""
    found = []
    for name in view.table.actors:
        other = unresponsive(view, name)
        if other is not None and name != root.culprit:
            found.append(f"also: {other.blame}")
        if abs(view.offset_s(name)) > SKEW_S:
            way = "ahead of" if view.offset_s(name) > 0 else "behind"
            found.append(f"the clock of {name} is {span(abs(view.offset_s(name)))} {way} the driver's; the times here allow for that")
    broken = failing(view, view.names("rollout"))
    if broken is not None and broken.culprit != root.culprit:
        found.append(f"also: {broken.blame}")
    return found

"""The walk into the learner: of ranks that do one call together, the culprit is the one that has not come where the others wait.

What a rank waits for inside torch's own gathers is not seen; a rank that is late for one of those shows as the one that got the least done.
"""

from __future__ import annotations

from streamrl.diagnosis.result import Link, span
from streamrl.diagnosis.roots import STACKS, Root, log_of, unresponsive
from streamrl.diagnosis.view import RunView
from streamrl.protocol.health import Health
from streamrl.protocol.waits import Doing

OTHERS = "the other ranks"


def learner(view: RunView, chain: list[Link]) -> Root:
    """Which rank keeps the stage from ending."""
    names = view.names("learner") or ["learner-0"]
    for name in names:
        if (root := unresponsive(view, name)) is not None:
            return root
    health = {name: found for name in names if (found := view.health(name)) is not None}
    calls = {name: _call(found) for name, found in health.items() if found.doing}
    waiting = [name for name, call in calls.items() if call.on == OTHERS]
    late = [name for name in health if name not in waiting]
    if waiting and late:
        return _absent(view, late, waiting, health, calls, chain)
    if len(waiting) > 1:
        seconds = min(view.age(name, calls[name].on_since) for name in waiting)
        says = f"is cut: all of them have waited for each other in {calls[waiting[0]].what} for {span(seconds)}"
        return Root("connection between the learner ranks", says, f"check the network between their nodes; {STACKS}", waiting[0], quiet_s=seconds)
    return _busy(view, calls, health)


def _call(health: Health) -> Doing:
    """The newest, but for a checkpoint that is written beside it."""
    return next((doing for doing in reversed(health.doing) if doing.name != "save"), health.doing[0])


def _absent(view: RunView, late: list[str], waiting: list[str], health: dict[str, Health], calls: dict[str, Doing], chain: list[Link]) -> Root:
    name = min(late, key=lambda name: (name in calls, health[name].progress))
    first = waiting[0]
    seconds = max(view.age(other, calls[other].on_since) for other in waiting)
    left_s = None if calls[first].limit_s is None else (calls[first].limit_s or 0.0) - seconds
    chain.append(Link(", ".join(waiting), f"{calls[first].what} in {calls[first].name}", name, seconds, left_s))
    call = calls.get(name)
    where = f"is in {call.name} since {span(view.age(name, call.since))}" if call is not None else "does not run the call"
    inner = f", waiting for {call.what} of {call.on}" if call is not None and call.on else ""
    says = f"has not entered the collective in which {', '.join(waiting)} wait{'s' if len(waiting) == 1 else ''} for {span(seconds)}: it {where}{inner}"
    told = f"{name} has used {health[name].cpu_s:.0f} s of CPU time; it last got something done {span(health[name].progress_age_s)} ago"
    return Root(name, says, f"{STACKS}; learner.step_timeout_s ends the stage; see {log_of(name)}", name, quiet_s=seconds, evidence=(told,))


def _busy(view: RunView, calls: dict[str, Doing], health: dict[str, Health]) -> Root:
    if not calls:
        name = next(iter(health), "learner-0")
        quiet_s, silent_s = health[name].progress_age_s if name in health else 0.0, view.silent_s(name)
        says = f"ran no call when it last answered, {span(silent_s)} ago" if silent_s else "runs no call"
        return Root(name, says, f"see {log_of(name)}", name, works=True, quiet_s=quiet_s, down="silent" if silent_s else "")
    name = min(calls, key=lambda name: (health[name].progress, -health[name].progress_age_s))
    call = calls[name]
    inner = f", there in {call.what} of {call.on}" if call.on else ""
    says = f"has been in {call.name} for {span(view.age(name, call.since))}{inner}"
    step = "it works: it is the slowest part of the run" if health[name].progress_age_s < 30 else f"see {log_of(name)}; {STACKS}"
    told = f"{name} last got something done {span(health[name].progress_age_s)} ago; {health[name].cpu_s:.0f} s of CPU time so far"
    return Root(name, says, step, name, works=True, quiet_s=min(health[name].progress_age_s, view.age(name, call.since)), evidence=(told,))

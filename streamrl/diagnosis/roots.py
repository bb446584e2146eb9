"""What stands at the end of a chain: something that waits for nobody, or that does not answer. Each kind in words, with the next step.

``certain``: it will not go on by itself, however long one waits. Otherwise ``quiet_s`` tells for how long it has got nothing done; whether that is too
long is for ``diagnose.py`` to say.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from streamrl.diagnosis.result import span
from streamrl.diagnosis.view import RunView
from streamrl.protocol.waits import FREE_SLOT, TURN, Calls, Doing

SILENT_S = 10.0  # the driver asks every second; an actor that gives no answer for this long does not work
FAILING_GROUPS = 4  # whose sessions failed in a row, without one success between them: fewer are a few bad rows
FAILING_S = 5.0  # so long, before it is certain
COMMAND = "streamrl why RUN --stacks"  # diagnose.py puts the folder in
STACKS = f"see where it stands with: {COMMAND}"
FRESH_S = 3.0  # of the driver's table: a round of questions, and the time that a hung actor may take to answer one

LIMIT_KEYS = {
    "engine": "rollout.timeouts.generate_s",
    "tool": "rollout.timeouts.tool_s",
    "scorer": "reward.timeout_s",
    "agent loop": "rollout.timeouts.session_s",
    "interaction": "rollout.timeouts.interaction_s",
}


Down = Literal["", "stopped", "dead", "silent"]


class Root(msgspec.Struct, frozen=True):
    """``says``: a clause with the culprit as its subject, ``place`` where that is. ``works``: it is busy, and that is all. ``down``: how an actor does not
    answer; empty: it does, or the culprit is no actor."""

    culprit: str
    says: str
    next_step: str
    actor: str = ""  # whose process it is in
    certain: bool = False
    works: bool = False
    quiet_s: float = 0.0
    evidence: tuple[str, ...] = ()
    place: str = ""  # "in rollout-0", of what is no actor
    down: Down = ""

    @property
    def subject(self) -> str:
        return f"{self.culprit} {self.place}".rstrip()

    @property
    def blame(self) -> str:
        return f"{self.subject} {self.says}"


def log_of(name: str) -> str:
    return f"logs/{name}.log"


def unresponsive(view: RunView, name: str, patience_s: float = SILENT_S) -> Root | None:
    """An actor whose process is gone or stopped, or that does not answer though it lives. None: it answers."""
    silent_s, state = view.silent_s(name), view.state_of(name)
    if name not in view.table.actors:
        return Root(name, "is not there: the driver has not started it, or is replacing it", f"see {log_of('driver')}", name, certain=False)
    health, since = view.health(name), f"for {span(silent_s)}"
    pid = f"pid {health.pid}" if health is not None else "pid unknown"
    if state == "gone" and (silent_s or _has_just_died(view, name)):
        last_s = silent_s + max(0.0, view.now - view.table.time)
        says, step = f"({pid}) is dead; it last answered {span(last_s)} ago", f"the driver replaces it; its end is in {log_of(name)}"
        return Root(name, says, step, name, silent_s > patience_s, quiet_s=last_s, down="dead")
    if not silent_s:
        return None
    if state == "stopped":
        pid_text = f"kill -CONT {health.pid}" if health is not None else "a SIGCONT"
        says, step = f"({pid}) is stopped by a signal and has not answered {since}", f"let it go on with: {pid_text}"
        return Root(name, says, step, name, True, quiet_s=silent_s, down="stopped")
    if silent_s <= patience_s:
        return None
    if health is None or not health.is_open or (view.processes.get(name) and view.processes[name][0].pid != health.pid):
        step = f"cluster.start_timeout_s ends the wait; see {log_of(name)}"
        return Root(name, f"is being opened and has not answered {since}", step, name, quiet_s=silent_s)
    if state == "unknown" and view.host(name):
        return Root(
            name,
            f"({pid} on {view.host(name)}) has not answered {since}: its node is cut off or down, or its event loop is blocked",
            f"check the network to {view.host(name)} and that node's processes; then {log_of(name)}",
            name,
            True,
            quiet_s=silent_s,
            down="silent",
        )
    return Root(name, f"({pid}) lives and has not answered {since}: its event loop is blocked", STACKS, name, True, quiet_s=silent_s, down="silent")


def _has_just_died(view: RunView, name: str) -> bool:
    """Whether the process that gave the newest answer is gone by now. An old table is that of a run whose actors are being closed."""
    health, mine = view.health(name), view.processes.get(name)
    return health is not None and mine is not None and bool(mine) and mine[0].pid == health.pid and view.now - view.table.time < FRESH_S


def kind_of(on: str) -> tuple[str, str]:
    """("tool", "search") of what a session waits for."""
    for kind in LIMIT_KEYS:
        if on == kind or on.startswith(f"{kind} "):
            return kind, on[len(kind) + 1 :]
    return on, ""


def held_by(view: RunView, name: str, doing: Doing) -> Root:
    """What a session of rollout actor ``name`` waits for innermost, when that is neither an actor nor the store."""
    kind, _ = kind_of(doing.on)
    age_s = view.age(name, doing.on_since) if doing.on_since else view.age(name, doing.since)
    if kind == "engine":
        return _engine(view, name, doing, age_s)
    if kind not in LIMIT_KEYS:
        says = f"has handed its rows over for {span(age_s)}" if kind == "replay" else f"has computed for {span(age_s)} and waits for nobody"
        step = f"look for what blocks it in {log_of(name)}; {STACKS}"
        return Root(f"session {doing.name}", says, step, name, quiet_s=age_s, place=f"of {name}")
    if doing.what.startswith(TURN):
        return _paced(name, doing, age_s)
    return _callee(view, name, doing, age_s)


def _paced(name: str, doing: Doing, age_s: float) -> Root:
    says = f"has let {who(doing.name)} wait for {doing.what} for {span(age_s)}"
    step = "raise that limit of the configuration, if what it protects takes more"
    return Root(doing.on, says, step, name, works=True, quiet_s=age_s, place=f"in {name}")


def _callee(view: RunView, name: str, doing: Doing, age_s: float) -> Root:
    """Whoever has the call of ``doing``; others may wait for a slot behind it."""
    kind, _ = kind_of(doing.on)
    calls = view.calls(name, doing.on)
    limit = f" of at most {span(doing.limit_s)}" if doing.limit_s is not None else ""
    does = f"has been in {doing.what}" if doing.what.startswith("the ") else "has not returned"
    num = sum(row.count for row in view.waits(name) if row.what == FREE_SLOT and kind_of(row.on)[0] == kind)
    behind = f"; behind it {num} {'call waits' if num == 1 else 'calls wait'} for {FREE_SLOT}" if num else ""
    says = f"{does} for {span(age_s)}{limit} ({who(doing.name)}){behind}"
    told = _record(calls) if calls is not None else ("none of its calls has ended so far",)
    return Root(doing.on, says, _advice(kind, name), name, quiet_s=age_s, evidence=told, place=f"in {name}")


def who(name: str) -> str:
    """An activity as a person reads it: session p7/2, validation (40 rows), version 3."""
    return f"session {name}" if "/" in name else name


def _advice(kind: str, name: str) -> str:
    limit = LIMIT_KEYS[kind]
    return {
        "tool": f"look at the tool: what it waits for, its server; {limit} ends such a call; {STACKS}",
        "scorer": f"look at the scorer, or at the server it asks; {limit} ends such a call; {log_of(name)} has its errors",
        "agent loop": f"the agent's own code does not go on; {limit} ends the session, replay.wait_s gives the group up; {STACKS}",
        "interaction": f"look at the interaction, or at what it asks; {limit} ends such a call",
    }[kind]


def _record(calls: Calls) -> tuple[str, ...]:
    found = [f"{calls.on}: {calls.ended} calls have ended, {calls.failures} failures in a row"]
    return (*found, f"newest error of {calls.on}: {calls.error}") if calls.error else tuple(found)


def _engine(view: RunView, name: str, doing: Doing, age_s: float) -> Root:
    """Quiet means: no token, where the engine can tell, else no answer."""
    health, calls = view.health(name), view.calls(name, doing.on)
    facts = health.rollout if health is not None else None
    last_s = view.age(name, calls.last_end) if calls is not None and calls.last_end else None
    quiet_s = facts.engine_quiet_s if facts is not None and facts.engine_quiet_s is not None else min(age_s, last_s if last_s is not None else age_s)
    num = sum(wait.count for wait in view.waits(name) if wait.on == doing.on)
    dead = [process.pid for process in view.processes.get(name, [])[1:] if process.state == "gone"]
    answered = f"; its last answer came {span(last_s)} ago" if last_s is not None else "; it has answered nothing so far"
    if dead and quiet_s > SILENT_S / 2:
        says = f"is dead: its process {dead[0]} is gone, {num} requests wait for it{answered}"
        step = f"see {log_of(name)}; have {name} replaced with: kill {health.pid if health is not None else name}"
        return Root(f"{name} engine", says, step, name, True, quiet_s=quiet_s)
    says = f"has {num} requests in flight and gave no token for {span(quiet_s)}{answered}"
    return Root(f"{name} engine", says, f"see {log_of(name)}; rollout.timeouts.generate_s ends a call; {STACKS}", name, works=True, quiet_s=quiet_s)


def failing(view: RunView, names: list[str]) -> Root | None:
    """A scorer, engine, interaction or agent loop whose calls only fail; the most telling one. A failing tool is an answer for the model."""
    found: list[tuple[int, int, str, Calls]] = []
    for name in names:
        health = view.health(name)
        for calls in health.calls if health is not None else []:
            kind, _ = kind_of(calls.on)
            if calls.failing_groups >= FAILING_GROUPS and kind in LIMIT_KEYS and kind != "tool":
                found.append((list(LIMIT_KEYS).index(kind) if kind != "scorer" else -1, -calls.failures, name, calls))
    if not found:
        return None
    _, _, name, calls = min(found, key=lambda one: one[:3])
    culprit = f"{name} engine" if calls.on == "engine" else calls.on
    says = f"has failed {calls.failures} times in a row: {calls.error}"
    failing_s = view.age(name, calls.failing_since)
    step = f"correct it; the first error has its traceback in {log_of(name)}"
    return Root(culprit, says, step, name, failing_s > FAILING_S, quiet_s=failing_s, evidence=_record(calls)[:1], place=f"in {name}")

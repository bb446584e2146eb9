"""The second half of the walk: rollout actors, the sessions they run, the store that takes their rows, and the versions they must take up."""

from __future__ import annotations

import msgspec

from streamrl.diagnosis.queues import queued
from streamrl.diagnosis.result import Link, span
from streamrl.diagnosis.roots import STACKS, Root, held_by, log_of, unresponsive, who
from streamrl.diagnosis.view import RunView
from streamrl.protocol.health import ReplayFacts
from streamrl.protocol.waits import FREE_SLOT, Doing

UNHEARD_S = 5.0  # a heartbeat is answered at once; one that is not for this long has not arrived
VALIDATION = "validation"
VERSION = "version"


def rollout(view: RunView, name: str, chain: list[Link], uid: str = "") -> Root:
    """What keeps rollout actor ``name`` from ending its sessions, those of group ``uid`` first."""
    if (root := unresponsive(view, name)) is not None:
        return root
    if (root := cut_off(view, name)) is not None:
        return root
    health = view.health(name)
    sessions = [doing for doing in health.doing if "/" in doing.name] if health is not None else []
    doing = next((doing for doing in sessions if doing.name.startswith(f"{uid}/")), next(iter(sessions), None))
    if health is None or doing is None:
        others = f"; it is busy with {health.doing[0].name}" if health is not None and health.doing else ""
        says = f"holds groups and runs no session of them{others}"
        return Root(name, says, f"see {log_of(name)}; {STACKS}", name, quiet_s=view.quiet_s(name))
    chain.append(Link(name, "its end", f"session {doing.name}", view.age(name, doing.since), note=f"{health.num_doing} sessions run"))
    return session(view, name, doing, chain)


def session(view: RunView, name: str, doing: Doing, chain: list[Link]) -> Root:
    """What a session waits for innermost."""
    since_s = view.age(name, doing.on_since) if doing.on_since else None
    left_s = None if doing.limit_s is None or since_s is None else doing.limit_s - since_s
    on = f"{name} {doing.on}" if doing.on == "engine" else doing.on
    if doing.on and doing.on != "its session":
        chain.append(Link(who(doing.name), doing.what, on, since_s, left_s))
    if doing.what == FREE_SLOT:
        return queued(view, name, doing, chain)
    if doing.on == "store":
        return store(view, name, since_s or 0.0)
    if doing.on == "replay" and (since_s or 0.0) > _unheard_limit_s(view) and not view.silent_s("replay"):
        return _unheard(view, name, "its pushes", since_s or 0.0)
    return held_by(view, name, doing)


def cut_off(view: RunView, name: str) -> Root | None:
    """Both ends answer the driver, and not each other."""
    beat = next((row for row in view.waits(name) if row.what == "the answer to a heartbeat"), None)
    waited_s = view.age(name, beat.since) if beat is not None else 0.0
    replay = view.health("replay")
    facts = replay.replay if replay is not None else None
    unheard_s = facts.workers.get(name, 0.0) if facts is not None else 0.0
    if waited_s <= _unheard_limit_s(view) or view.silent_s("replay"):
        return None
    return _unheard(view, name, "its heartbeats", max(waited_s, unheard_s))


def _unheard_limit_s(view: RunView) -> float:
    """Well before the leases are lost."""
    replay = view.health("replay")
    return UNHEARD_S if replay is None or replay.replay is None else min(UNHEARD_S, replay.replay.lease_s / 4)


def _unheard(view: RunView, name: str, what: str, seconds: float) -> Root:
    where = f" ({view.host(name)})" if view.host(name) else ""
    says = f"is cut: {name}{where} has had no answer to {what} for {span(seconds)}, though both answer the driver"
    return Root(
        f"connection between {name} and replay",
        says,
        f"check the network between their nodes; after replay.lease_s its groups go to others; see {log_of(name)}",
        name,
        certain=True,
        quiet_s=seconds,
    )


def idle(view: RunView, facts: ReplayFacts, chain: list[Link]) -> Root:
    """Groups are pending and nobody takes them: which rollout actor does not, and why?"""
    names = view.names("rollout")
    for name in names:
        if (root := unresponsive(view, name) or cut_off(view, name)) is not None:
            return root
    if not facts.leasable:
        return Root(
            "replay", f"leases nothing: {facts.blocked_by}", f"see {log_of('replay')}", "replay", quiet_s=facts.oldest[0].age_s if facts.oldest else 0.0
        )
    for name in names:
        if (root := _without_slots(view, name, chain)) is not None:
            return root
    name = names[0] if names else "rollout-0"
    return Root(
        name, f"leases none of {facts.pending} pending groups", f"see {log_of(name)}; {STACKS}", name, quiet_s=facts.oldest[0].age_s if facts.oldest else 0.0
    )


def _without_slots(view: RunView, name: str, chain: list[Link]) -> Root | None:
    health = view.health(name)
    wait = next((row for row in view.waits(name) if row.what == "a free session slot"), None)
    facts = health.rollout if health is not None else None
    if health is None or facts is None or wait is None:
        return None
    since_s = view.age(name, wait.since)
    chain.append(Link(name, wait.what, wait.on, since_s))  # no deadline: a session that is being scored has no limit, only its call has
    if facts.gate_closed_s is not None:
        validating = next((doing for doing in health.doing if doing.name.startswith(VALIDATION)), None)
        if validating is not None:
            return session(view, name, validating, chain)
        says = f"leases no group: its gate is closed since {span(facts.gate_closed_s)}, for a validation that does not run"
        return Root(name, says, f"see {log_of(name)} and {log_of('trainer')}", name, quiet_s=since_s)
    sessions = [doing for doing in health.doing if "/" in doing.name]
    if not sessions:
        return None
    found = session(view, name, sessions[0], chain)
    told = f"{name}: {facts.sessions} of {facts.slots} session slots are taken (rollout.max_sessions_per_actor)"
    return msgspec.structs.replace(found, evidence=(told, *found.evidence))


def store(view: RunView, name: str, since_s: float) -> Root:
    """Rows find no room, or are not taken."""
    near = next((store for store in view.names("store") if view.host(store) == view.host(name)), "store")
    if (root := unresponsive(view, near)) is not None:
        return root
    health = view.health(near)
    use = health.store if health is not None else None
    if use is None or use.bytes_allocated < 0.5 * use.capacity_bytes:
        return Root(near, f"has not taken rows of {name} for {span(since_s)}", f"see {log_of(near)}; {STACKS}", near, quiet_s=since_s)
    says = (
        f"is full: {_mib(use.bytes_allocated)} of {_mib(use.capacity_bytes)} are lent or hold rows ({_mib(use.bytes_live)} live), "
        f"a put of {name} has waited {span(since_s)} for room"
    )
    step = "raise dataplane.capacity_bytes or set dataplane.spill=true; fewer groups in flight (replay.max_staleness, data.train_batch_size) need less"
    groups = ", ".join(f"{name}: {part.rows} rows, {part.groups} groups" for name, part in use.partitions.items())
    return Root(near, says, step, near, quiet_s=since_s, evidence=(f"rows in {near}: {groups or 'none'}",))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"


def publication(view: RunView, chain: list[Link]) -> Root:
    """Which replica has not taken the version up."""
    row = next((row for row in view.waits("trainer") if row.on == "rollout actors" and row.what.startswith(VERSION)), None)
    health = view.health("trainer")
    facts = health.trainer if health is not None else None
    if row is None or facts is None:
        return Root(
            "trainer", "has not published what it trained", f"see {log_of('trainer')}; {STACKS}", "trainer", works=True, quiet_s=view.quiet_s("trainer")
        )
    since_s = view.age("trainer", row.since)
    left_s = None if row.limit_s is None else row.limit_s - since_s
    late = sorted((name for name, seconds in facts.unacknowledged.items() if seconds), key=lambda name: -facts.unacknowledged[name])
    if not late:
        chain.append(Link("trainer", row.what, row.on, since_s, left_s))
        return _nobody_serves(view, facts.held, chain)
    name = late[0]
    others = [other for other in facts.unacknowledged if other != name]
    chain.append(Link("trainer", row.what, name, since_s, left_s, note=f"also not there yet: {', '.join(sorted(others))}" if others else ""))
    return update(view, name, facts.unacknowledged[name])


def update(view: RunView, name: str, since_s: float) -> Root:
    """Why replica ``name`` has not acknowledged a version."""
    if (root := unresponsive(view, name)) is not None:
        return root
    health = view.health(name)
    doing = next((doing for doing in health.doing if doing.name.startswith(f"{VERSION} ")), None) if health is not None else None
    if doing is None:
        says = f"has not begun to take the version up, {span(since_s)} after it was told"
        return Root(name, says, f"see {log_of(name)}; weights.publish_timeout_s takes it out of rotation", name, quiet_s=since_s)
    if doing.on == "store":
        return store(view, name, since_s)
    says = f"has not taken up {doing.name} for {span(since_s)}"
    return Root(f"{name} engine", says, f"see {log_of(name)}; weights.publish_timeout_s takes it out of rotation; {STACKS}", name, quiet_s=since_s)


def _nobody_serves(view: RunView, held: list[str], chain: list[Link]) -> Root:
    for name in view.names("rollout"):
        if (root := unresponsive(view, name)) is not None:
            return root
    if held:
        return validation(view, chain)
    return Root("rollout actors", "none of them serves", f"see {log_of('driver')} for what became of them", quiet_s=view.quiet_s("trainer"))


def validation(view: RunView, chain: list[Link]) -> Root:
    """Which replica has not answered its validation rows."""
    for name in view.names("rollout"):
        if (root := unresponsive(view, name)) is not None:
            return root
    asked = [
        (name, doing)
        for name in view.names("rollout")
        if (health := view.health(name)) is not None
        for doing in health.doing
        if doing.name.startswith(VALIDATION)
    ]
    if not asked:
        return Root("trainer", "judges a validation", f"see {log_of('trainer')}", "trainer", works=True, quiet_s=view.quiet_s("trainer"))
    name, doing = asked[0]
    chain.append(Link("trainer", doing.name, name, view.age(name, doing.since)))
    return session(view, name, doing, chain)

"""The first half of the walk: the trainer, the replay buffer it takes batches from, and the prompts that buffer is fed with.

Each function adds its links to ``chain`` and returns the root that it leads to.
"""

from __future__ import annotations

import msgspec

from streamrl.diagnosis import ranks, workers
from streamrl.diagnosis.result import Link, span
from streamrl.diagnosis.roots import STACKS, Root, failing, log_of, unresponsive
from streamrl.diagnosis.view import RunView
from streamrl.protocol.health import ReplayFacts
from streamrl.protocol.waits import Wait

REASON_HINTS = {
    "reward_error": "scores",
    "engine_error": "engine calls",
    "env_error": "interactions",
    "loop_error": "agent loops",
    "session_timeout": "sessions that ran out of time",
}


def link(view: RunView, name: str, wait: Wait, note: str = "", on: str = "") -> Link:
    """A wait of ``name`` as a link."""
    since_s = view.age(name, wait.since)
    return Link(name, wait.what, on or wait.on, since_s, None if wait.limit_s is None else wait.limit_s - since_s, note)


def trainer(view: RunView, chain: list[Link]) -> Root:
    """What keeps the next step from ending."""
    if (root := unresponsive(view, "trainer")) is not None:
        return root
    rows = view.waits("trainer")
    stage = next((row for row in rows if row.on == "learner" and not row.what.startswith("the checkpoint")), None)
    if stage is not None:
        chain.append(link(view, "trainer", stage))
        return ranks.learner(view, chain)
    batch = next((row for row in rows if row.on == "replay"), None)
    if batch is not None:
        chain.append(link(view, "trainer", batch))
        return replay(view, chain)
    other = next((row for row in rows if row.on != "learner"), next(iter(rows), None))
    if other is None:
        return _between(view)
    if other.what.startswith("validation"):
        chain.append(link(view, "trainer", other))
        return workers.validation(view, chain)
    if other.on == "rollout actors":
        return workers.publication(view, chain)
    chain.append(link(view, "trainer", other))
    return ranks.learner(view, chain)


def _between(view: RunView) -> Root:
    return Root("trainer", "waits for nobody", f"see {log_of('trainer')}; {STACKS}", "trainer", works=True, quiet_s=view.quiet_s("trainer"))


def replay(view: RunView, chain: list[Link]) -> Root:
    """What keeps the next batch from being complete."""
    if (root := unresponsive(view, "replay")) is not None:
        return root
    health = view.health("replay")
    facts = health.replay if health is not None else None
    if facts is None:
        return Root("replay", "has told nothing of its groups yet", f"see {log_of('replay')}", "replay", works=True)
    if (root := _broken(view, facts)) is not None:
        return root
    if abs(view.drift_s("replay")) > max(1.0, facts.lease_s / 2) and facts.expired_leases:
        return _clock(view, facts)
    if facts.ready + facts.running + facts.pending >= max(1, facts.needed) or not facts.unpublished:
        if facts.running or facts.pending:
            return _groups(view, facts, chain)
    return _admission(view, facts, chain)


def _broken(view: RunView, facts: ReplayFacts) -> Root | None:
    """Attempts fail for one reason: by the breaker's judgement, or long before it by the failures in a row of one callee."""
    root = failing(view, view.names("rollout"))
    if facts.breaker == "closed":
        return root
    told = f"the breaker is {facts.breaker}: too many attempts failed with {facts.breaker_reason}, {facts.breaker_trials} trials have failed since"
    if root is not None:
        return msgspec.structs.replace(root, certain=True, quiet_s=0.0, evidence=(told, *root.evidence))
    if facts.breaker_trials.startswith("0 "):
        says = f"leases only a few trial groups: {told}"
        return Root("replay", says, "the breaker closes as soon as one of them ends well", "replay", evidence=(told,))
    what = REASON_HINTS.get(facts.breaker_reason or "", facts.breaker_reason or "sessions")
    return Root(what, f"fail: {told}", f"see the sessions' errors in {log_of('rollout-*')}", view.names("rollout")[0], True, evidence=(told,))


def _clock(view: RunView, facts: ReplayFacts) -> Root:
    drift_s = view.drift_s("replay")
    way = "fast" if drift_s > 0 else "slow"
    says = f"has run {span(abs(drift_s))} too {way} since it was first asked: {facts.expired_leases} leases of workers that live have expired"
    return Root(
        "clock of replay", says, "check the clock of that machine (suspended, migrated, stepped); leases hold again once it runs evenly", "replay", True
    )


def _groups(view: RunView, facts: ReplayFacts, chain: list[Link]) -> Root:
    """The groups of the batch are admitted: one that runs, or that nobody has leased."""
    group = facts.oldest[0] if facts.oldest else None
    held = next((group for group in facts.oldest if group.state == "running" and group.worker), None)
    if held is None or (group is not None and group.late and group.state == "pending"):
        chain.append(Link("replay", f"a lease of {facts.pending} pending groups", "rollout actors", group.age_s if group is not None else None))
        return workers.idle(view, facts, chain)
    note = f"{held.settled} of {held.sessions} sessions have ended, attempt {held.attempt}"
    note += "; the batch waits for it, since it would be too stale for a later one" if held.late else ""
    chain.append(Link("replay", f"group {held.uid}", held.worker or "", held.age_s, held.left_s, note))
    return workers.rollout(view, held.worker or "", chain, uid=held.uid)


def _admission(view: RunView, facts: ReplayFacts, chain: list[Link]) -> Root:
    """Fewer groups are alive than a batch takes: who must admit more, or free the slots?"""
    if facts.end_of_data:
        return Root("data source", "has ended: no further prompt will come", "train for fewer steps, or raise trainer.total_epochs", "prompt", True)
    if facts.unpublished and facts.admission in ("staleness_bound", None) and facts.outstanding >= facts.capacity_groups:
        said = f"{facts.outstanding} of {facts.capacity_groups} slots, {facts.unpublished} of them until the next version is out"
        chain.append(Link("replay", "free slots", "the publication", note=said))
        return workers.publication(view, chain)
    if facts.admission is not None and facts.admission != "staleness_bound":
        limit = {"inflight_limit": "replay.max_inflight_groups"}.get(facts.admission, f"the limit {facts.admission}")
        return Root("replay", f"admits nothing: {facts.blocked_by or facts.admission}", f"look at {limit}", "replay", True)
    free = facts.capacity_groups - facts.outstanding
    if free <= 0 and facts.leased:
        chain.append(Link("replay", "free slots", "the trainer", note=f"{facts.outstanding} of {facts.capacity_groups} slots, {facts.leased} of them leased"))
        says = f"has not given back {facts.leased} groups of its last batch"
        return Root("trainer", says, f"see {log_of('trainer')}", "trainer", works=True, quiet_s=view.quiet_s("trainer"))
    chain.append(Link("replay", f"prompts ({free} slots are free)", "prompt"))
    return prompt(view, chain)


def prompt(view: RunView, chain: list[Link]) -> Root:
    """What keeps the next prompts."""
    if (root := unresponsive(view, "prompt")) is not None:
        return root
    rows = view.waits("prompt")
    data = next((row for row in rows if row.on == "data"), None)
    if data is None:
        says = "admits no prompt though there are free slots"
        return Root("prompt", says, f"see {log_of('prompt')}; {STACKS}", "prompt", works=True, quiet_s=view.quiet_s("prompt"))
    chain.append(link(view, "prompt", data, on="the data source"))
    age_s = view.age("prompt", data.since)
    return Root(
        "data source",
        f"has given no prompt for {span(age_s)}",
        f"look at data.train_files and their storage (or data.custom_cls); {log_of('prompt')} has its errors; {STACKS}",
        "prompt",
        quiet_s=age_s,
    )

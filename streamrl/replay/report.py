"""Words for a stalled buffer: who waits for what. Reads the buffer, changes nothing."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from streamrl.errors import TakeTimeout
from streamrl.protocol.groups import ReplayStats
from streamrl.protocol.health import GroupFact, ReplayFacts

if TYPE_CHECKING:
    from streamrl.replay.buffer import ReplayBuffer

SHOWN = 5  # groups named in a message


def stats(buffer: ReplayBuffer) -> ReplayStats:
    """Counts at this instant."""
    count, oldest = buffer.table.count, next(iter(buffer.table.groups.values()), None)
    counts = ReplayStats(
        published_version=buffer.published_version,
        pending=count["pending"],
        running=count["running"],
        ready=count["ready"],
        leased=count["leased"],
        trained_unpublished=buffer.trained_unpublished,
        spent_unpublished=buffer.spent_unpublished + buffer.learners.spent,
        outstanding=buffer.outstanding,
        capacity_groups=buffer.capacity_groups,
        oldest_group_age_s=0.0 if oldest is None else buffer.clock() - oldest.admitted_at,
        blocked_by=blocked_by(buffer),
        zero_variance=dict(buffer.life.signal.shares),
        admission_blocked=None if buffer.breaker.state == "tripped" else buffer.admission(1).reason,
    )
    return buffer.ledger.fill(counts)


def facts(buffer: ReplayBuffer, needed: int = 0) -> ReplayFacts:
    """What a diagnosis reads. ``needed``: groups that the trainer asks for."""
    count, now, breaker = buffer.table.count, buffer.clock(), buffer.breaker
    return ReplayFacts(
        needed=needed,
        pending=count["pending"],
        running=count["running"],
        ready=count["ready"],
        leased=count["leased"],
        outstanding=buffer.outstanding,
        capacity_groups=buffer.capacity_groups,
        unpublished=buffer.trained_unpublished + buffer.spent_unpublished,
        leasable=buffer.leasable,
        blocked_by=blocked_by(buffer),
        admission=None if breaker.state == "tripped" else buffer.admission(1).reason,
        breaker=breaker.state,
        breaker_reason=breaker.reason,
        breaker_trials=breaker.trials,
        failures=dict(_failures(buffer)),
        oldest=_awaited(buffer),
        workers=buffer.life.workers.heard(now),
        lease_s=buffer.life.workers.lease_s,
        expired_leases=buffer.ledger.expired_leases,
        end_of_data=buffer.end_of_data,
        closed=buffer.closed,
        clock=now,
    )


def _awaited(buffer: ReplayBuffer) -> list[GroupFact]:
    """Groups that a batch may wait for, the most telling first."""
    now = buffer.clock()
    late = {group.uid: buffer.late.until(group) - now for group in buffer.late.groups()}
    waiting = [group for group in buffer.table.groups.values() if group.state in ("running", "pending")]
    waiting.sort(key=lambda group: (group.uid not in late, group.state != "running", group.seq_no))
    return [
        GroupFact(
            group.uid,
            group.state,
            group.attempt,
            now - group.admitted_at,
            group.worker,
            len(group.sessions),
            buffer.n,
            group.uid in late,
            late.get(group.uid),
        )
        for group in waiting[:SHOWN]
    ]


def _failures(buffer: ReplayBuffer) -> Counter[str]:
    alive = buffer.table.groups.values()
    reasons = Counter(cause for group in alive for cause in group.failures)
    reasons.update(session.reason for group in alive for session in group.sessions.values() if session.reason is not None)
    return reasons


def failures(buffer: ReplayBuffer) -> str:
    """What the living groups have failed with so far: whole attempts, and sessions of the running one."""
    return ", ".join(f"{count} {reason}" for reason, count in _failures(buffer).most_common()) or "none"


def blocked_by(buffer: ReplayBuffer) -> str | None:
    """What keeps the next group or batch from coming; None when nothing does."""
    late = buffer.late.groups()
    if late:
        names = ", ".join(f"{group.uid} (worker {group.worker}, oldest version {group.assumed_version})" for group in late[:SHOWN])
        return f"late groups: sampling waits for {len(late)} group(s) that the next publication would make too stale: {names}"
    if buffer.breaker.state != "closed":
        return f"breaker {buffer.breaker.state}: too many attempts failed with {buffer.breaker.reason}"
    count = buffer.table.count
    if count["pending"] and not count["running"] and buffer.leasable:
        return f"no rollout actor: {count['pending']} group(s) are pending and none is running"
    if buffer.outstanding >= buffer.capacity_groups:
        return f"staleness bound: {buffer.outstanding} of {buffer.capacity_groups} groups are outstanding"
    return None


def take_timeout(buffer: ReplayBuffer, num_groups: int, wait_s: float) -> TakeTimeout:
    """Counts by state, the oldest groups in flight with age and holder, and what blocks."""
    count, now = buffer.table.count, buffer.clock()
    states = ", ".join(f"{state} {count[state]}" for state in ("pending", "running", "ready", "leased"))
    inflight = [group for group in buffer.table.groups.values() if group.state in ("pending", "running")][:SHOWN]
    oldest = "; ".join(
        f"{group.uid} seq_no {group.seq_no} {group.state} attempt {group.attempt} {now - group.admitted_at:.1f} s old, worker {group.worker}, "
        f"{len(group.sessions)} of {buffer.n} sessions settled"
        for group in inflight
    )
    cause = blocked_by(buffer) or ("no prompts were admitted" if not count["running"] and not buffer.end_of_data else "running groups have not settled")
    return TakeTimeout(
        f"take({num_groups}) waits at most {wait_s:g} s, got no batch: {states}, trained unpublished {buffer.outstanding - len(buffer.table.groups)}, "
        f"published version {buffer.published_version}; blocked by {cause}; failed sessions and attempts: {failures(buffer)}; "
        f"oldest in flight: {oldest or 'none'}; "
        f"look at the named worker or raise replay.take_timeout_s"
    )

"""Who holds what: rollout leases that expire with their worker's silence, learner leases that end by name only.

A worker's leases share one deadline, since a heartbeat renews all of them. A learner lease has no time limit: a hung step is ended by whoever
watches the learner, and what it held comes back by ``abandon``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from streamrl.errors import LeaseExpired
from streamrl.protocol.groups import TakenBatch
from streamrl.protocol.meta import KVBatchMeta
from streamrl.replay.groups import Group

MAX_ENDED_LEASES = 4096  # remembered, so that a repeated commit is told apart from one of a stranger


class WorkerState(msgspec.Struct):
    """A worker with the groups it holds and what it must still be told to stop."""

    name: str
    deadline: float
    held: list[str]
    cancel: list[tuple[str, int, float]]  # uid, attempt, when to stop repeating it


class LearnerState(msgspec.Struct):
    """All learner leases: those held as (id, uids, size at the take), how the others ended, and the next id."""

    held: list[tuple[int, list[str], int]]
    ended: dict[int, str]
    next_id: int


@dataclass(slots=True)
class _Worker:
    deadline: float
    held: dict[str, Group] = field(default_factory=dict)
    cancel: dict[tuple[str, int], float] = field(default_factory=dict)  # (uid, attempt) -> when to stop repeating it


class WorkerLeases:
    """Rollout leases by worker."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._workers: dict[str, _Worker] = {}

    def __len__(self) -> int:
        return sum(bool(worker.held) for worker in self._workers.values())

    @property
    def lease_s(self) -> float:
        return self._lease_s

    def heard(self, now: float) -> dict[str, float]:
        """Workers that are known, with the seconds since they were last heard."""
        return {name: max(0.0, now - (worker.deadline - self._lease_s)) for name, worker in self._workers.items()}

    def renew(self, name: str, now: float) -> None:
        """The worker is alive."""
        worker = self._workers.setdefault(name, _Worker(0.0))
        worker.deadline = now + self._lease_s

    def grant(self, name: str, group: Group) -> None:
        self._workers[name].held[group.uid] = group
        group.worker = name

    def release(self, group: Group) -> None:
        """The group is no longer this worker's business."""
        worker = self._workers.get(group.worker or "")
        if worker is not None:
            worker.held.pop(group.uid, None)
        group.worker = None

    def order_cancel(self, group: Group, now: float) -> None:
        """Tell the holder at its next heartbeats to stop; repeated for one lease time, since a reply can be lost."""
        worker = self._workers.get(group.worker or "")
        if worker is not None:
            worker.cancel[(group.uid, group.attempt)] = now + self._lease_s

    def cancelled(self, name: str, now: float) -> list[tuple[str, int]]:
        worker = self._workers[name]
        worker.cancel = {pair: until for pair, until in worker.cancel.items() if until > now}
        return list(worker.cancel)

    def acknowledge(self, name: str, pair: tuple[str, int]) -> None:
        """The worker gave the pair back, so it need not be told again."""
        if name in self._workers:
            self._workers[name].cancel.pop(pair, None)

    def forget(self, name: str) -> list[Group]:
        """The worker is gone: what it held, in sequence order."""
        worker = self._workers.pop(name, None)
        return [] if worker is None else sorted(worker.held.values(), key=lambda group: group.seq_no)

    def expire(self, now: float) -> list[Group]:
        """Groups whose worker has been silent for too long. The worker stays known for one more lease time, so that it hears what was taken."""
        taken: list[Group] = []
        for name, worker in list(self._workers.items()):
            if worker.deadline > now:
                continue
            if not worker.held:
                del self._workers[name]
                continue
            for group in worker.held.values():
                self.order_cancel(group, now)
            taken += worker.held.values()
            worker.held, worker.deadline = {}, now + self._lease_s
        return sorted(taken, key=lambda group: group.seq_no)

    def forget_all(self) -> None:
        """None of them is alive any more."""
        self._workers = {}

    def go_on(self, now: float) -> None:
        """Nobody could reach us for a while: everyone gets a full lease time to be heard."""
        for worker in self._workers.values():
            worker.deadline = now + self._lease_s

    def dump(self) -> list[WorkerState]:
        return [
            WorkerState(name, worker.deadline, list(worker.held), [(*pair, until) for pair, until in worker.cancel.items()])
            for name, worker in self._workers.items()
        ]

    def load(self, states: list[WorkerState], groups: Mapping[str, Group]) -> None:
        """Continue from a saved state."""
        for state in states:
            held = {uid: groups[uid] for uid in state.held}
            self._workers[state.name] = _Worker(state.deadline, held, {(uid, attempt): until for uid, attempt, until in state.cancel})

    def next_deadline(self) -> float | None:
        return min((worker.deadline for worker in self._workers.values()), default=None)


@dataclass(slots=True)
class LearnerLease:
    """Groups that a learner step holds. ``size`` is their number at the take; dropped ones leave ``groups``."""

    lease_id: int
    groups: dict[str, Group]
    size: int

    def batch(self, published: int) -> TakenBatch:
        """What the learner is handed."""
        keys: list[str] = []
        tags: list[dict[str, Any]] = []
        for group in self.groups.values():
            keys += group.keys()
            tags += group.tags()
        meta = KVBatchMeta("train", keys, tags, extra_info={"published_version": published})
        return TakenBatch(self.lease_id, meta, list(self.groups), [group.lag for group in self.groups.values()], published)


class LearnerLeases:
    """Learner leases by id. Ids are never reused, so a lease of an older learner incarnation can't be committed."""

    def __init__(self) -> None:
        self._held: dict[int, LearnerLease] = {}
        self._ended: dict[int, str] = {}
        self._next = 1

    def grant(self, groups: list[Group]) -> LearnerLease:
        lease = LearnerLease(self._next, {group.uid: group for group in groups}, len(groups))
        self._held[lease.lease_id] = lease
        self._next += 1
        return lease

    def held(self, lease_id: int) -> LearnerLease:
        """LeaseExpired unless it is held now."""
        lease = self._held.get(lease_id)
        if lease is None:
            fate = self._ended.get(lease_id, "unknown")
            raise LeaseExpired(f"a learner lease is used while it is held, got lease {lease_id} which is {fate}; take a batch again")
        return lease

    def all_held(self) -> list[LearnerLease]:
        return list(self._held.values())

    def uids(self, lease_id: int) -> list[str]:
        """The groups of a lease; empty when it is not held."""
        return list(self._held[lease_id].groups) if lease_id in self._held else []

    @property
    def spent(self) -> int:
        """Groups that were dropped from a batch which is still held."""
        return sum(lease.size - len(lease.groups) for lease in self._held.values())

    def has_ended_as(self, lease_id: int, fate: str) -> bool:
        """The same call arrived before (its reply was lost)."""
        return self._ended.get(lease_id) == fate

    def end(self, lease: LearnerLease, fate: str) -> None:
        del self._held[lease.lease_id]
        self._ended[lease.lease_id] = fate
        if len(self._ended) > MAX_ENDED_LEASES:
            self._ended.pop(next(iter(self._ended)))

    def dump(self) -> LearnerState:
        held = [(lease.lease_id, list(lease.groups), lease.size) for lease in self._held.values()]
        return LearnerState(held, dict(self._ended), self._next)

    def load(self, state: LearnerState, groups: Mapping[str, Group]) -> None:
        """Continue from a saved state."""
        self._held = {lease_id: LearnerLease(lease_id, {uid: groups[uid] for uid in uids}, size) for lease_id, uids, size in state.held}
        self._ended, self._next = state.ended, state.next_id

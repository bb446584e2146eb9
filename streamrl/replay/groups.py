"""One group, its legal transitions, and the table that holds all living groups.

The table is the only place where a state changes, so the counts by state and the two queues can't drift from the groups. It knows nothing
of why a group moves: that is decided in ``buffer.py``.

    pending -> running -> ready -> leased -> trained
       ^          |       | ^         |
       +----------+-------+ +---------+        any state before trained -> dropped

A ready group is issued again only when the store lost its rows. A trained one comes back (``revive``) only when its update is lost.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any, get_args

from streamrl.errors import ProtocolError
from streamrl.protocol.groups import GroupState, Outcome, SessionPush
from streamrl.replay.staleness import VersionBuckets, lag

LEGAL: dict[GroupState, frozenset[GroupState]] = {
    "pending": frozenset({"running", "dropped"}),
    "running": frozenset({"pending", "ready", "dropped"}),
    "ready": frozenset({"leased", "pending", "dropped"}),
    "leased": frozenset({"ready", "trained", "dropped"}),
    "trained": frozenset(),
    "dropped": frozenset(),
}
MAX_ENDED = 1 << 16  # ended uids that are remembered, to refuse late writes with their fate and a uid that comes twice


@dataclass(slots=True, eq=False)
class Group:
    """All sessions of one prompt. ``sessions`` holds what the current attempt has pushed so far."""

    uid: str
    seq_no: int
    row: dict[str, Any]
    admitted_at: float
    attempt: int = 1
    state: GroupState = "pending"
    outcome: Outcome | None = None  # None until the attempt settled
    worker: str | None = None  # holder of the rollout lease while running
    sessions: dict[int, SessionPush] = field(default_factory=dict)
    oldest_version: int | None = None  # over the rows of the attempt; None: no row yet, staleness 0
    assumed_version: int = 0  # no token of the attempt is older: the published version at its lease, or its oldest row
    failures: list[str] = field(default_factory=list)  # cause of each failed attempt
    strays: list[str] = field(default_factory=list)  # rows of refused pushes, freed when the group ends
    late_since: float | None = None  # sampling has waited for this group since then
    lag: int = 0  # staleness at the last check before training
    checked_version: int = 0  # the published version at that check

    def keys(self) -> list[str]:
        """Rows of the attempt in training order: by session, inside a session by index."""
        return [key for _, session in sorted(self.sessions.items()) for key in session.keys]

    def tags(self) -> list[dict[str, Any]]:
        """One tag per key, in the same order."""
        return [tag for _, session in sorted(self.sessions.items()) for tag in session.tags]

    def measure(self, published: int) -> int:
        """Its staleness now, noted for the ledger."""
        self.lag, self.checked_version = lag(published, self.oldest_version), published
        return self.lag

    def lengths(self) -> list[int]:
        """Response tokens of each row, in the same order."""
        return [tag["response_len"] for tag in self.tags()]

    def written(self) -> int:
        """Tokens of these rows that the policy wrote."""
        return sum(written_tokens(session) for session in self.sessions.values())

    def new_attempt(self) -> None:
        """Forget what the attempt produced; the sequence number stays."""
        self.attempt += 1
        self.outcome, self.worker, self.oldest_version, self.late_since = None, None, None, None
        self.sessions = {}


def written_tokens(session: SessionPush) -> int:
    """Tokens in the session's rows that the policy wrote."""
    return sum(tag["response_len"] for tag in session.tags) if session.written_tokens is None else session.written_tokens


class SeqQueue:
    """Groups in ascending sequence number. Removal from the middle is lazy: the heap may hold numbers that have left."""

    def __init__(self) -> None:
        self._members: dict[int, Group] = {}
        self._heap: list[int] = []

    def __len__(self) -> int:
        return len(self._members)

    def add(self, group: Group) -> None:
        if group.seq_no not in self._members:
            self._members[group.seq_no] = group
            heapq.heappush(self._heap, group.seq_no)

    def discard(self, group: Group) -> None:
        self._members.pop(group.seq_no, None)
        if not self._members:
            self._heap.clear()

    def pop(self) -> Group:
        """The member with the lowest number; IndexError when empty."""
        while True:
            group = self._members.pop(heapq.heappop(self._heap), None)
            if group is not None:
                return group

    def members(self) -> list[Group]:
        return sorted(self._members.values(), key=lambda group: group.seq_no)


class GroupTable:
    """Living groups by uid, counted by state. ``changes`` grows with every move, so a waiter can tell whether looking again is worth it."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}  # in order of admission
        self.count: dict[GroupState, int] = dict.fromkeys(get_args(GroupState), 0)
        self.pending = SeqQueue()  # may be leased now
        self.ready = SeqQueue()
        self.running_versions = VersionBuckets()
        self.ended: dict[str, str] = {}  # uid -> "trained" or "dropped(reason)"
        self.changes = 0

    def add(self, group: Group) -> None:
        """A new pending group. ProtocolError when the uid lives or has lived."""
        fate = self.ended.get(group.uid) or (self.groups[group.uid].state if group.uid in self.groups else None)
        if fate is not None:
            raise ProtocolError(f"a uid is admitted once, got {group.uid!r} which is {fate}; the prompt source must name each prompt anew")
        self.groups[group.uid] = group
        self.count["pending"] += 1
        self.pending.add(group)
        self.changes += 1

    def move(self, group: Group, state: GroupState, reason: str | None = None) -> None:
        """Change a group's state; ProtocolError names both states when the step is illegal. Final states leave the table."""
        if state not in LEGAL[group.state]:
            raise ProtocolError(f"a group goes from {group.state} to one of {sorted(LEGAL[group.state])}, got {state} for {group.uid} (seq_no {group.seq_no})")
        self._leave(group)
        self.count[group.state] -= 1
        self.count[state] += 1
        group.state = state
        self.changes += 1
        if state in ("trained", "dropped"):
            self._end(group, f"dropped({reason})" if state == "dropped" else state)
        else:
            self._enter(group)

    def revive(self, groups: dict[str, tuple[Group, GroupState]]) -> None:
        """Trained groups whose update is lost live again, in the state given (pending or ready). The order of admission is kept."""
        for uid, (group, state) in groups.items():
            self.ended.pop(uid, None)
            self.count["trained"] -= 1
            self.place(group, state)
        if groups:
            self.groups = {group.uid: group for group in sorted(self.groups.values(), key=lambda group: group.seq_no)}

    def place(self, group: Group, state: GroupState) -> None:
        """A group that comes from elsewhere (a saved state, a lost update) lives in ``state``."""
        group.state = state
        self.groups[group.uid] = group
        self.count[state] += 1
        self.changes += 1
        self._enter(group)

    def note_version(self, group: Group, version: int) -> None:
        """A row of ``version`` arrived for a running group."""
        group.oldest_version = version if group.oldest_version is None else min(version, group.oldest_version)
        if version < group.assumed_version:
            self.running_versions.discard(group.assumed_version, group.uid)
            group.assumed_version = version
            self.running_versions.add(version, group.uid)

    def end_of(self, uid: str) -> str:
        """The drop reason of a group that ended untrained; "superseded" for an attempt of any other."""
        return self.ended.get(uid, "").partition("(")[2].rstrip(")") or "superseded"

    def in_state(self, state: GroupState) -> list[Group]:
        """Groups of a state in sequence order: for rare events and messages, not for every call."""
        return sorted((g for g in self.groups.values() if g.state == state), key=lambda g: g.seq_no)

    def _enter(self, group: Group) -> None:
        if group.state == "pending":
            self.pending.add(group)
        elif group.state == "running":
            self.running_versions.add(group.assumed_version, group.uid)
        elif group.state == "ready":
            self.ready.add(group)

    def _leave(self, group: Group) -> None:
        if group.state == "pending":
            self.pending.discard(group)
        elif group.state == "ready":
            self.ready.discard(group)
        elif group.state == "running":
            self.running_versions.discard(group.assumed_version, group.uid)

    def _end(self, group: Group, fate: str) -> None:
        del self.groups[group.uid]
        self.ended[group.uid] = fate
        if len(self.ended) > MAX_ENDED:
            self.ended.pop(next(iter(self.ended)))

"""The moves of a group and all that goes with them: ledger, garbage, worker leases, breaker and quarantine move together, or not at all.

Decides what follows when a session arrives, an attempt fails or a holder disappears. Knows nothing of batches, publications or slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from streamrl.config.rollout import ReplayConfig
from streamrl.errors import ProtocolError, StaleWrite
from streamrl.protocol.groups import SessionPush
from streamrl.protocol.trajectory import Prompt
from streamrl.replay.breaker import Breaker
from streamrl.replay.fates import OnFate
from streamrl.replay.garbage import Garbage
from streamrl.replay.groups import Group, GroupState, GroupTable
from streamrl.replay.lease import WorkerLeases
from streamrl.replay.ledger import Ledger
from streamrl.replay.outcome import OutcomeRule
from streamrl.replay.provisional import Provisional, TrainedGroup
from streamrl.replay.quarantine import Quarantine
from streamrl.replay.sessions import checked_session, oldest_version
from streamrl.replay.zero_variance import SignalFilter


class Lifecycle:
    """Every change of a group's state passes through here."""

    def __init__(self, config: ReplayConfig, rule: OutcomeRule, signal: SignalFilter, clock: Callable[[], float], on_fate: OnFate | None = None) -> None:
        self.rule = rule
        self.signal = signal
        self.clock = clock
        self.table = GroupTable()
        self.ledger = Ledger(on_fate)
        self.breaker = Breaker(config)
        self.garbage = Garbage()
        self.quarantine = Quarantine()
        self.workers = WorkerLeases(config.lease_s)
        self.provisional = Provisional(config.retain == "checkpoint", config.retain_bytes or 0)

    def admit(self, prompt: Prompt, seq_no: int) -> None:
        """A new group; a quarantined prompt is dropped at once."""
        group = Group(prompt.uid, seq_no, prompt.row, self.clock())
        self.table.add(group)
        self.ledger.admitted += 1
        if self.quarantine.holds(prompt.row):
            self.drop(group, "quarantined")

    def run(self, group: Group, worker: str, published: int) -> None:
        """``worker`` holds the group's rollout lease; engines serve ``published`` or newer."""
        group.assumed_version = published
        self.table.move(group, "running")
        self.workers.grant(worker, group)
        self.breaker.leased(group.uid, self.clock())

    def push(self, session: SessionPush, newest_version: int) -> Group | None:
        """Take in a settled session; the last one of the attempt settles the group. None: this very push had arrived before."""
        group = self.table.groups.get(session.uid)
        if group is None or session.attempt < group.attempt or group.state == "pending":
            raise self._refuse(session, group)
        session = checked_session(session, group, self.rule.n, newest_version)
        known = group.sessions.get(session.session_id)
        if known is not None:
            if known.keys == session.keys and known.reason == session.reason:
                return None
            raise ProtocolError(f"a session is pushed once, got session {session.session_id} of {session.uid} again with other rows; number sessions 0..n-1")
        if group.state != "running":
            raise self._refuse(session, group)
        self._accept(group, session)
        return group

    def lose(self, groups: list[Group]) -> None:
        """Rollout leases ended with their holder."""
        for group in groups:
            self.ledger.expired_leases += 1
            self._fail(group, "lease_expired")

    def reissue(self, group: Group) -> None:
        """Pending again under a new attempt; the rows so far are superseded."""
        self.workers.release(group)
        self.ledger.supersede(group)
        self.garbage.superseded(group)
        self.table.move(group, "pending")
        self.breaker.forget(group.uid, self.clock())
        group.new_attempt()

    def drop(self, group: Group, reason: str) -> None:
        """The group ends untrained. A holder that still generates is told to stop."""
        now = self.clock()
        if group.state == "running" and len(group.sessions) < self.rule.n:
            self.workers.order_cancel(group, now)
        self.workers.release(group)
        self.table.move(group, "dropped", reason)
        self.ledger.drop(group, reason)
        self.garbage.dropped(group)
        self.breaker.forget(group.uid, now)

    def train(self, group: Group, published: bool = False) -> None:
        """The group's update was applied. Its rows stay until a checkpoint contains it, as far as the budget goes. ``published``: it waits for no
        publication."""
        self.table.move(group, "trained")
        self.ledger.train(group)
        self.let_go(self.provisional.add(group, published))

    def let_go(self, trained: list[TrainedGroup]) -> None:
        """Rows of trained groups are not kept any longer."""
        for entry in trained:
            if entry.held:
                self.garbage.settle(entry)
                self.provisional.let_go(entry)

    def roll_back(self, trained: list[TrainedGroup], may_keep: Callable[[Group], bool]) -> None:
        """The updates of these groups are lost. Those with rows that may still be used are ready again, the others are generated again."""
        revived: dict[str, tuple[Group, GroupState]] = {}
        lost: list[Group] = []
        for entry in trained:
            group, kept = entry.group, entry.held and may_keep(entry.group)
            self.ledger.roll_back(entry, kept)
            group.late_since = None
            revived[group.uid] = (group, "ready" if kept else "pending")
            if not kept:
                lost.append(group)
        self.garbage.lost(lost)
        for group in lost:
            group.new_attempt()
        self.table.revive(revived)

    def collect_garbage(self) -> list[str]:
        """Keys to clear now. Groups whose next rows could be taken for these are not leased before they are gone."""
        keys, held = self.garbage.collect()
        for uid in held:
            group = self.table.groups.get(uid)
            if group is not None:
                self.table.pending.discard(group)
        return keys

    def garbage_cleared(self, keys: Iterable[str]) -> None:
        """The store has freed ``keys``."""
        for uid in self.garbage.cleared(keys):
            group = self.table.groups.get(uid)
            if group is not None and group.state == "pending":
                self.table.pending.add(group)
                self.table.changes += 1

    def _accept(self, group: Group, session: SessionPush) -> None:
        group.sessions[session.session_id] = session
        self.ledger.generate(session)
        oldest = oldest_version(session)
        if oldest is not None:
            self.table.note_version(group, oldest)
        outcome = self.rule.outcome(group)
        if outcome == "failed":
            self._fail(group, self.rule.cause(group))
        elif outcome is not None:
            group.outcome = outcome
            self._settle(group)

    def _settle(self, group: Group) -> None:
        """Complete or partial: ready, unless its samples have nothing to tell."""
        self.breaker.record(group.uid, None, self.clock())
        if self.signal.has_no_signal(group):
            self.drop(group, "zero_variance")
            return
        self.workers.release(group)
        self.table.move(group, "ready")

    def _fail(self, group: Group, cause: str) -> None:
        """An attempt came to nothing: issue the group again or, when no attempt is left, drop it."""
        group.failures.append(cause)
        self.breaker.record(group.uid, cause, self.clock())
        reason = self.rule.final_reason(group)
        if reason is None:
            self.reissue(group)
            return
        if reason == "quarantined":
            self.quarantine.add(group.row)
        self.drop(group, reason)

    def _refuse(self, session: SessionPush, group: Group | None) -> StaleWrite:
        """Count a late write. Its rows are garbage at once when the group has ended, else with the group (their keys may be in use again)."""
        self.ledger.rejected_writes += 1
        what = f"session {session.session_id} of {session.uid}, attempt {session.attempt}"
        kept = self.provisional.held(session.uid)
        if kept is not None:  # trained, and its rows may be needed again
            kept.strays += session.keys
        elif group is None:
            self.garbage.stray(session)
        if group is None:
            fate = self.table.ended.get(session.uid, "unknown here")
            return StaleWrite(f"rows are accepted while their group runs, got {what}, of a group which is {fate}; discard them")
        group.strays += session.keys
        now = f"{group.state} at attempt {group.attempt}"
        return StaleWrite(f"rows are accepted for the running attempt, got {what}, of a group which is {now}; discard them")

"""The ledger: every admitted group and every acknowledged row ends in exactly one place.

    admitted groups         = trained + dropped(by reason) + in flight
    generated rows, tokens  = trained + dropped(by reason) + in flight

Two reasons exist for rows only: "superseded" (of an attempt that was given up) and "rolled_back" (of a trained group whose update was lost with
its rows). Trained is what the surviving weights hold: a rollback takes groups out of it. Tokens are response tokens, from the tag ``response_len``;
those that the policy wrote have books of their own, ``tokens.py``.
"""

from __future__ import annotations

from collections import Counter

from streamrl.protocol.groups import ReplayStats, SessionPush
from streamrl.replay.fates import Fate, OnFate, fate_of
from streamrl.replay.groups import Group, written_tokens
from streamrl.replay.provisional import TrainedGroup
from streamrl.replay.tokens import TokenFates

SUPERSEDED = "superseded"
ROLLED_BACK = "rolled_back"


class Ledger:
    """Totals since the run began; they continue across a restart. ``on_fate`` hears of every end."""

    def __init__(self, on_fate: OnFate | None = None) -> None:
        self._on_fate = on_fate
        self.admitted = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self.rolled_back = 0
        self.rows_rolled_back = 0
        self.tokens_rolled_back = 0
        self.rows_generated = 0
        self.rows_trained = 0
        self.rows_dropped: Counter[str] = Counter()
        self.tokens_generated = 0
        self.tokens_trained = 0
        self.tokens_dropped: Counter[str] = Counter()
        self.written = TokenFates()
        self.events: Counter[str] = Counter()  # "leased" by a step, "released" by a step or a worker
        self.staleness_violations = 0
        self.expired_leases = 0
        self.rejected_writes = 0
        self.partial_trained = 0
        self.lag_sum = 0
        self.lag_max = 0

    def generate(self, session: SessionPush) -> None:
        self.rows_generated += len(session.keys)
        self.tokens_generated += sum(tag["response_len"] for tag in session.tags)
        self.written.arrive(written_tokens(session))
        if session.lost_tokens:
            self.written.spend(session.lost_tokens, "lost")

    def train(self, group: Group) -> None:
        fate = self._record(fate_of(group, "trained"))
        self._move_trained(1, fate.rows, fate.tokens, group)
        self.written.train(group.written())
        self.lag_max = max(self.lag_max, group.lag)

    def drop(self, group: Group, reason: str) -> None:
        self.dropped[reason] += 1
        self.written.waste(group.written(), reason)
        self._drop_rows(fate_of(group, "dropped", reason), reason)

    def supersede(self, group: Group) -> None:
        """The attempt is given up; the group lives on."""
        fate = fate_of(group, "superseded")
        if fate.rows:
            self.written.waste(group.written(), SUPERSEDED)
            self._drop_rows(fate, SUPERSEDED)

    def roll_back(self, trained: TrainedGroup, kept: bool) -> None:
        """The update is lost: the group is in flight again, its rows too if they are ``kept``."""
        group = trained.group
        fate = Fate(group.uid, group.seq_no, group.attempt, "rolled_back", rows=trained.rows, tokens=trained.tokens, kept=kept)
        self.rolled_back += 1
        self.written.roll_back(trained.written, kept)
        self.rows_rolled_back += fate.rows
        self.tokens_rolled_back += fate.tokens
        self._move_trained(-1, -fate.rows, -fate.tokens, group)
        if kept:
            self._record(fate)
        else:
            self._drop_rows(fate, ROLLED_BACK)

    def _move_trained(self, groups: int, rows: int, tokens: int, group: Group) -> None:
        self.trained += groups
        self.rows_trained += rows
        self.tokens_trained += tokens
        self.partial_trained += groups * (group.outcome == "partial")
        self.lag_sum += groups * group.lag

    def _drop_rows(self, fate: Fate, reason: str) -> None:
        self._record(fate)
        if fate.rows:
            self.rows_dropped[reason] += fate.rows
            self.tokens_dropped[reason] += fate.tokens

    def _record(self, fate: Fate) -> Fate:
        if self._on_fate is not None:
            self._on_fate(fate)
        return fate

    def fill(self, stats: ReplayStats) -> ReplayStats:
        """Write the totals into ``stats``."""
        stats.admitted, stats.trained, stats.dropped, stats.rolled_back = self.admitted, self.trained, dict(self.dropped), self.rolled_back
        stats.trajectories_generated, stats.trajectories_trained = self.rows_generated, self.rows_trained
        stats.tokens_generated, stats.tokens_trained = self.tokens_generated, self.tokens_trained
        stats.trajectories_dropped, stats.tokens_dropped = dict(self.rows_dropped), dict(self.tokens_dropped)
        stats.trajectories_rolled_back, stats.tokens_rolled_back = self.rows_rolled_back, self.tokens_rolled_back
        stats.expired_leases, stats.rejected_writes = self.expired_leases, self.rejected_writes
        stats.partial_trained, stats.lag_sum, stats.lag_max = self.partial_trained, self.lag_sum, self.lag_max
        stats.events, stats.staleness_violations = dict(self.events), self.staleness_violations
        self.written.fill(stats)
        return stats

    def load(self, stats: ReplayStats) -> None:
        """Continue from these totals."""
        self.admitted, self.trained, self.dropped, self.rolled_back = stats.admitted, stats.trained, Counter(stats.dropped), stats.rolled_back
        self.rows_generated, self.rows_trained = stats.trajectories_generated, stats.trajectories_trained
        self.tokens_generated, self.tokens_trained = stats.tokens_generated, stats.tokens_trained
        self.rows_dropped, self.tokens_dropped = Counter(stats.trajectories_dropped), Counter(stats.tokens_dropped)
        self.rows_rolled_back, self.tokens_rolled_back = stats.trajectories_rolled_back, stats.tokens_rolled_back
        self.expired_leases, self.rejected_writes = stats.expired_leases, stats.rejected_writes
        self.partial_trained, self.lag_sum, self.lag_max = stats.partial_trained, stats.lag_sum, stats.lag_max
        self.events, self.staleness_violations = Counter(stats.events), stats.staleness_violations
        self.written.load(stats)

    def supersede_lost(self) -> None:
        """Rows that were in flight when the totals were saved are gone with their store."""
        lost_rows = self.rows_generated - self.rows_trained - self.rows_dropped.total()
        if lost_rows:
            self.rows_dropped[SUPERSEDED] += lost_rows
            self.tokens_dropped[SUPERSEDED] += self.tokens_generated - self.tokens_trained - self.tokens_dropped.total()
        self.written.lose()

"""The ledger: every admitted group and every acknowledged row ends in exactly one place.

    admitted groups         = trained + dropped(by reason) + in flight
    generated rows, tokens  = trained + dropped(by reason) + in flight     ("superseded": rows of an attempt that was given up)

Tokens are response tokens, taken from the tag ``response_len``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from streamrl.protocol.groups import ReplayStats, SessionPush
from streamrl.replay.groups import Group

SUPERSEDED = "superseded"


def _tokens(sessions: Iterable[SessionPush]) -> int:
    return sum(tag["response_len"] for session in sessions for tag in session.tags)


class Ledger:
    """Totals since the run began; they continue across a restart."""

    def __init__(self) -> None:
        self.admitted = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self.rows_generated = 0
        self.rows_trained = 0
        self.rows_dropped: Counter[str] = Counter()
        self.tokens_generated = 0
        self.tokens_trained = 0
        self.tokens_dropped: Counter[str] = Counter()
        self.expired_leases = 0
        self.rejected_writes = 0
        self.partial_trained = 0
        self.lag_sum = 0
        self.lag_max = 0

    def generate(self, session: SessionPush) -> None:
        self.rows_generated += len(session.keys)
        self.tokens_generated += _tokens([session])

    def train(self, group: Group) -> None:
        self.trained += 1
        self.rows_trained += sum(len(session.keys) for session in group.sessions.values())
        self.tokens_trained += _tokens(group.sessions.values())
        self.partial_trained += group.outcome == "partial"
        self.lag_sum += group.lag
        self.lag_max = max(self.lag_max, group.lag)

    def drop(self, group: Group, reason: str) -> None:
        self.dropped[reason] += 1
        self._drop_rows(group, reason)

    def supersede(self, group: Group) -> None:
        """The attempt is given up; the group lives on."""
        self._drop_rows(group, SUPERSEDED)

    def _drop_rows(self, group: Group, reason: str) -> None:
        rows = sum(len(session.keys) for session in group.sessions.values())
        if rows:
            self.rows_dropped[reason] += rows
            self.tokens_dropped[reason] += _tokens(group.sessions.values())

    def fill(self, stats: ReplayStats) -> ReplayStats:
        """Write the totals into ``stats``."""
        stats.admitted, stats.trained, stats.dropped = self.admitted, self.trained, dict(self.dropped)
        stats.trajectories_generated, stats.trajectories_trained = self.rows_generated, self.rows_trained
        stats.tokens_generated, stats.tokens_trained = self.tokens_generated, self.tokens_trained
        stats.trajectories_dropped, stats.tokens_dropped = dict(self.rows_dropped), dict(self.tokens_dropped)
        stats.expired_leases, stats.rejected_writes = self.expired_leases, self.rejected_writes
        stats.partial_trained, stats.lag_sum, stats.lag_max = self.partial_trained, self.lag_sum, self.lag_max
        return stats

    def restore(self, stats: ReplayStats) -> None:
        """Continue from a snapshot. Rows that were in flight then are gone with their store, so they end as superseded."""
        self.admitted, self.trained, self.dropped = stats.admitted, stats.trained, Counter(stats.dropped)
        self.rows_generated, self.rows_trained = stats.trajectories_generated, stats.trajectories_trained
        self.tokens_generated, self.tokens_trained = stats.tokens_generated, stats.tokens_trained
        self.rows_dropped, self.tokens_dropped = Counter(stats.trajectories_dropped), Counter(stats.tokens_dropped)
        self.expired_leases, self.rejected_writes = stats.expired_leases, stats.rejected_writes
        self.partial_trained, self.lag_sum, self.lag_max = stats.partial_trained, stats.lag_sum, stats.lag_max
        lost_rows = self.rows_generated - self.rows_trained - self.rows_dropped.total()
        if lost_rows:
            self.rows_dropped[SUPERSEDED] += lost_rows
            self.tokens_dropped[SUPERSEDED] += self.tokens_generated - self.tokens_trained - self.tokens_dropped.total()

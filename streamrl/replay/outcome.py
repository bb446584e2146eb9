"""What an attempt came to, from its settled sessions: complete, partial or failed; and whether a repeat could cure a failure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from streamrl.config.base import refuse
from streamrl.protocol.groups import DROP_REASONS, Outcome
from streamrl.replay.groups import Group

_PRECEDENCE = {reason: place for place, reason in enumerate(DROP_REASONS)}


def most_frequent(reasons: Iterable[str]) -> str:
    """The reason that occurs most often; of equals the one listed first in the table of drop reasons.

    >>> most_frequent(["overlong", "env_error", "env_error"])
    'env_error'
    """
    counts = Counter(reasons)
    return min(counts, key=lambda reason: (-counts[reason], _PRECEDENCE[reason]))


def min_good_sessions(n: int, configured: int | None, group_estimator: bool) -> int:
    """As configured; by default two where samples of a group are compared, else one.

    >>> min_good_sessions(8, None, group_estimator=True)
    2
    """
    return configured if configured is not None else (min(2, n) if group_estimator else 1)


class OutcomeRule:
    """``min_sessions`` good sessions make a group worth training: default min(2, n) where groups are compared, else 1."""

    def __init__(self, n: int, min_sessions: int | None, group_estimator: bool, max_attempts: int) -> None:
        if min_sessions is not None and min_sessions > n:
            raise refuse("replay.min_sessions", f"at most rollout.n ({n}) sessions can be good", min_sessions, "lower it or raise rollout.n")
        self.n = n
        self.min_sessions = min_good_sessions(n, min_sessions, group_estimator)
        self._max_attempts = max_attempts

    def is_hopeless(self, group: Group) -> bool:
        """Too many sessions failed in a way that a repeat can't cure: waiting for the others is pointless."""
        incurable = sum(not session.retryable for session in group.sessions.values() if session.reason is not None)
        return incurable > self.n - self.min_sessions

    def outcome(self, group: Group) -> Outcome | None:
        """None while sessions are open."""
        if self.is_hopeless(group):
            return "failed"
        if len(group.sessions) < self.n:
            return None
        good = sum(session.reason is None for session in group.sessions.values())
        return "complete" if good == self.n else "partial" if good >= self.min_sessions else "failed"

    def cause(self, group: Group) -> str:
        """Why the attempt failed."""
        return most_frequent(session.reason for session in group.sessions.values() if session.reason is not None)

    def final_reason(self, group: Group) -> str | None:
        """The drop reason when no attempt is left, else None. ``group.failures`` already holds the cause of this attempt."""
        if self.is_hopeless(group):
            return group.failures[-1]
        if len(group.failures) < self._max_attempts:
            return None
        return "lease_expired" if set(group.failures) == {"lease_expired"} else "quarantined"

"""The zero-variance filter: a group whose samples all earned the same has no advantage and so no gradient.

Judged once per group, when its outcome is known, by the score of each good session's last output. Floats are compared exactly: identical scores
have a standard deviation of exactly 0. A group with one good session is never filtered.
"""

from __future__ import annotations

from streamrl.config.filter_groups import FilterGroups
from streamrl.errors import RunFailed
from streamrl.replay.groups import Group

SHOWN = 5  # groups named in the message


class SignalFilter:
    """Knows the metric's name; remembers the first groups that lack it, since that is the run's mistake and not the worker's who pushed."""

    def __init__(self, config: FilterGroups) -> None:
        self._config = config
        self.lacking: list[str] = []  # uids
        self.known: list[str] = []  # metrics that the first of them has

    def has_no_signal(self, group: Group) -> bool:
        """Whether all good sessions have the same score."""
        if not self._config.enable:
            return False
        good = [session.scores for session in group.sessions.values() if session.reason is None]
        if any(self._config.metric not in scores for scores in good):
            self._note(group, sorted(set().union(*good)))
            return False
        return len(good) > 1 and len({scores[self._config.metric] for scores in good}) == 1

    def check(self) -> None:
        """RunFailed when a group without the metric was seen."""
        if self.lacking:
            raise RunFailed(
                f"algorithm.filter_groups.metric names a number that the reward function returns for every sample, got {self._config.metric!r}, "
                f"which {', '.join(self.lacking)} lack (they have {', '.join(self.known) or 'none'}); name one of these or return it"
            )

    def _note(self, group: Group, known: list[str]) -> None:
        if len(self.lacking) < SHOWN:
            self.lacking.append(group.uid)
            self.known = self.known or known

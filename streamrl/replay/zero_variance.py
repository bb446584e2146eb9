"""The zero-variance filter: a group whose samples all earned the same has no advantage and so no gradient.

Judged once per group, when its outcome is known, by the score of each good session's last output. Floats are compared exactly: identical scores
have a standard deviation of exactly 0. A group with one good session is never filtered.

Counts the share that is filtered, by environment: a batch of judged groups is as many as a step trains, so that the share is known even where
hardly a group passes. Who is told of it is not decided here.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from streamrl.config.filter_groups import FilterGroups
from streamrl.errors import RunFailed
from streamrl.replay.groups import Group

SHOWN = 5  # groups named in the message
BARREN_SHARE = 0.95  # a batch that loses more than this teaches next to nothing
BARREN_BATCHES = 10  # so many in a row are no chance
MAX_ENVS = 64  # counted by name; data with more sources than this shares the last one
OTHER = "other"


class SignalState(msgspec.Struct):
    """Everything the filter knows."""

    lacking: list[str]
    known: list[str]
    judged: dict[str, int]
    filtered: dict[str, int]
    shares: dict[str, float]
    streaks: dict[str, int]


def env_of(row: dict[str, Any]) -> str:
    """The environment of a row, as metrics name it: its data source, else its agent loop.

    >>> env_of({"data_source": "gsm8k", "agent_name": "tool_agent"}), env_of({"agent_name": "tool_agent"}), env_of({})
    ('gsm8k', 'tool_agent', 'unknown')
    """
    return str(row.get("data_source") or row.get("agent_name") or "unknown")


class SignalFilter:
    """Knows the metric's name; remembers the first groups that lack it, since that is the run's mistake and not the worker's who pushed."""

    def __init__(self, config: FilterGroups, batch_groups: int) -> None:
        self._config = config
        self._batch_groups = batch_groups
        self.lacking: list[str] = []  # uids
        self.known: list[str] = []  # metrics that the first of them has
        self.shares: dict[str, float] = {}  # by environment: filtered of the groups judged, in the last batch that had any of it
        self._streaks: dict[str, int] = {}  # by environment: batches in a row that lost more than BARREN_SHARE
        self._judged: Counter[str] = Counter()  # of the batch under way
        self._filtered: Counter[str] = Counter()

    def has_no_signal(self, group: Group) -> bool:
        """Whether all good sessions have the same score."""
        if not self._config.enable:
            return False
        flat = self._is_flat(group)
        env = env_of(group.row)
        if env not in self.shares and env not in self._judged and len(self.shares) + len(self._judged) >= MAX_ENVS:
            env = OTHER
        self._judged[env] += 1
        self._filtered[env] += flat
        if self._judged.total() >= self._batch_groups:
            self._end_batch()
        return flat

    def barren(self) -> list[str]:
        """Environments that have had next to no signal for BARREN_BATCHES batches."""
        return [env for env, streak in self._streaks.items() if streak >= BARREN_BATCHES]

    def check(self) -> None:
        """RunFailed when a group without the metric was seen."""
        if self.lacking:
            raise RunFailed(
                f"algorithm.filter_groups.metric names a number that the reward function returns for every sample, got {self._config.metric!r}, "
                f"which {', '.join(self.lacking)} lack (they have {', '.join(self.known) or 'none'}); name one of these or return it"
            )

    def dump(self) -> SignalState:
        return SignalState(self.lacking, self.known, dict(self._judged), dict(self._filtered), dict(self.shares), dict(self._streaks))

    def load(self, state: SignalState) -> None:
        """Continue from a saved state."""
        self.lacking, self.known, self.shares, self._streaks = state.lacking, state.known, state.shares, state.streaks
        self._judged, self._filtered = Counter(state.judged), Counter(state.filtered)

    def _is_flat(self, group: Group) -> bool:
        good = [session.scores for session in group.sessions.values() if session.reason is None]
        if any(self._config.metric not in scores for scores in good):
            self._note(group, sorted(set().union(*good)))
            return False
        return len(good) > 1 and len({scores[self._config.metric] for scores in good}) == 1

    def _end_batch(self) -> None:
        for env, judged in self._judged.items():
            share = self._filtered[env] / judged
            self.shares[env] = share
            self._streaks[env] = self._streaks.get(env, 0) + 1 if share > BARREN_SHARE else 0
        self._judged.clear()
        self._filtered.clear()

    def _note(self, group: Group, known: list[str]) -> None:
        if len(self.lacking) < SHOWN:
            self.lacking.append(group.uid)
            self.known = self.known or known

"""Circuit breaker: a dead tool server must not burn the dataset in a hot loop.

closed -> open when more than ``ratio`` of the last ``window`` attempts failed for one reason: nothing is admitted, and nothing that was admitted
before is leased, or the groups that stand ready for generation would use up their attempts, and the trial would have to wait for all of them.
open -> trial after the cool-down: one group is leased. Its success closes the breaker, its failure opens it again.
After ``max_trials`` failed trials it is tripped: everyone who waits for groups gets BreakerOpen, which ends the run with the cause.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Literal

import msgspec

from streamrl.config.rollout import ReplayConfig
from streamrl.errors import BreakerOpen

BreakerMode = Literal["closed", "open", "trial", "tripped"]


class BreakerState(msgspec.Struct):
    """Everything the breaker knows."""

    mode: BreakerMode
    reason: str | None
    window: list[str | None]
    failed_trials: int
    open_until: float
    trial: str | None


class Breaker:
    """Judges attempts; knows groups by uid only."""

    def __init__(self, config: ReplayConfig) -> None:
        self.state: BreakerMode = "closed"
        self.reason: str | None = None  # why it left "closed"
        self._window: deque[str | None] = deque(maxlen=config.breaker_window)
        self._limit = config.breaker_ratio * config.breaker_window
        self._counts: Counter[str] = Counter()
        self._cooldown_s = config.breaker_cooldown_s
        self._max_trials = config.breaker_max_trials
        self._failed_trials = 0
        self._open_until = 0.0
        self._trial: str | None = None

    @property
    def trials(self) -> str:
        """Failed ones of those allowed."""
        return f"{self._failed_trials} of {self._max_trials}"

    def record(self, uid: str, reason: str | None, now: float) -> None:
        """An attempt of ``uid`` settled; ``reason`` None means well."""
        if self.state == "closed":
            self._remember(reason)
            if reason is not None and self._counts[reason] > self._limit:
                self._open(reason, now)
        elif self.state == "trial" and uid == self._trial:
            self._judge_trial(reason, now)

    def slots(self, now: float) -> int | None:
        """Groups that may be leased; None: as many as you like."""
        if self.state == "closed":
            return None
        return 1 if self.state == "open" and now >= self._open_until else 0

    def leased(self, uid: str, now: float) -> None:
        """A group was leased: while open and cooled down it is the trial."""
        if self.state == "open" and now >= self._open_until:
            self.state, self._trial = "trial", uid

    def forget(self, uid: str, now: float) -> None:
        """The attempt ended in a way that says nothing about the cause (stale, given back): another trial may start at once."""
        if self.state == "trial" and uid == self._trial:
            self.state, self._trial, self._open_until = "open", None, now

    def check(self) -> None:
        """BreakerOpen when tripped."""
        if self.state == "tripped":
            raise BreakerOpen(
                f"at most {self._limit:g} of the last {self._window.maxlen} attempts may fail for one reason, got more with {self.reason!r} "
                f"and {self._failed_trials} failed trials after it; repair the cause (see the sessions' log) and resume"
            )

    def next_deadline(self, now: float) -> float | None:
        """When the cool-down ends; None when nothing changes by itself."""
        return self._open_until if self.state == "open" and self._open_until > now else None

    def dump(self) -> BreakerState:
        return BreakerState(self.state, self.reason, list(self._window), self._failed_trials, self._open_until, self._trial)

    def load(self, state: BreakerState) -> None:
        """Continue from a saved state; the window is that of the new configuration."""
        self.state, self.reason, self._trial = state.mode, state.reason, state.trial
        self._failed_trials, self._open_until = state.failed_trials, state.open_until
        for reason in state.window:
            self._remember(reason)

    def _remember(self, reason: str | None) -> None:
        if len(self._window) == self._window.maxlen and (oldest := self._window[0]) is not None:
            self._counts[oldest] -= 1
        self._window.append(reason)
        if reason is not None:
            self._counts[reason] += 1

    def _open(self, reason: str, now: float) -> None:
        self.state, self.reason, self._trial = "open", reason, None
        self._open_until = now + self._cooldown_s

    def _judge_trial(self, reason: str | None, now: float) -> None:
        if reason is None:
            self.state, self.reason, self._trial, self._failed_trials = "closed", None, None, 0
            self._window.clear()
            self._counts.clear()
            return
        self._failed_trials += 1
        self._open(reason, now)
        if self._failed_trials >= self._max_trials:
            self.state = "tripped"

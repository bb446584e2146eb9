"""What a run says about itself: one record a step, totals for the summary. Plain values only."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from streamrl.protocol.groups import ReplayStats
from streamrl.protocol.learn import UpdateReport
from streamrl.protocol.meta import KVBatchMeta

KEPT_RECORDS = 32  # told to a trainer's successor: more than the driver leaves unread
REWARD_WINDOW = 10  # steps averaged for reward_first and reward_last (fewer in a short run)


class StepRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line of ``metrics/steps.jsonl``. ``metrics`` has verl's names; a validation is a record of its own with ``val_accuracy``."""

    step: int
    version: int
    time: float = msgspec.field(default_factory=time.time)
    reward: float | None = None  # mean score of the batch's trajectories
    trajectories: int = 0
    response_tokens: int = 0
    trajectories_per_s: float = 0.0  # since the previous step's end
    tokens_per_s: float = 0.0  # response tokens generated a second, since the previous step's end
    lag_mean: float = 0.0  # versions, over groups, at the optimizer step
    lag_max: int = 0
    lags: list[int] = []
    step_s: float = 0.0
    wait_data_s: float = 0.0
    pending: int = 0
    running: int = 0
    ready: int = 0
    leased: int = 0
    dropped: int = 0
    val_accuracy: float | None = None
    warning: str | None = None  # what went wrong while the run goes on; a record of its own
    metrics: dict[str, float] = {}


class RecordWindow:
    """The newest records of a run, numbered from its start. What the driver has read goes, but for the last ``KEPT_RECORDS``: it asks every second.

    >>> window = RecordWindow()
    >>> window.append(StepRecord(step=1, version=1))
    >>> len(window.since(0)), len(window.since(1))
    (1, 0)
    """

    def __init__(self) -> None:
        self._first = 0
        self._records: list[StepRecord] = []

    def append(self, record: StepRecord) -> None:
        self._records.append(record)

    def since(self, number: int) -> list[StepRecord]:
        """From ``number`` on; those before it are known to who asks."""
        read = min(number - self._first, len(self._records) - KEPT_RECORDS)
        if read > 0:
            del self._records[:read]
            self._first += read
        return self._records[max(0, number - self._first) :]

    def newest(self) -> tuple[int, list[StepRecord]]:
        """What a successor is told, and the number of its first one."""
        records = self._records[-KEPT_RECORDS:]
        return self._first + len(self._records) - len(records), records

    def load(self, first: int, records: list[StepRecord]) -> None:
        """Go on where another window stood."""
        self._first, self._records = first, records


class Totals(msgspec.Struct):
    """Running sums over the steps of a run; part of its checkpoint, so that a resumed run's summary covers the whole. Their size is bounded."""

    steps: int = 0
    rewards: list[float] = []  # of the first and the last REWARD_WINDOW steps
    val_accuracies: list[float] = []  # the first and the last
    trained_tokens: int = 0
    stats: ReplayStats = msgspec.field(default_factory=ReplayStats)
    last_step_end: float = 0.0
    last_generated: int = 0
    earlier_trajectories: int = 0  # acknowledged before this driver began: its rates leave them out
    earlier_tokens: int = 0  # of these, likewise

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> Totals:
        """Totals from a checkpoint; the clock starts anew."""
        totals = msgspec.convert(saved, cls)
        totals.last_step_end = 0.0
        return totals

    def begin(self, stats: ReplayStats) -> None:
        """A driver begins where ``stats`` stand: what they count already, it has not seen."""
        self.earlier_trajectories = stats.trajectories_generated
        self.earlier_tokens = self.last_generated = stats.tokens_generated

    def step(
        self,
        *,
        step: int,
        version: int,
        meta: KVBatchMeta,
        lags: list[int],
        metrics: dict[str, float],
        update: UpdateReport,
        stats: ReplayStats,
        seconds: float,
        wait_data_s: float,
    ) -> StepRecord:
        """Add one step and describe it."""
        now = time.time()
        elapsed = now - self.last_step_end if self.last_step_end else seconds + wait_data_s
        generated = stats.tokens_generated - self.last_generated
        reward = metrics.get("critic/score/mean")
        self.steps = step
        if reward is not None:
            self.rewards.append(reward)
            del self.rewards[REWARD_WINDOW:-REWARD_WINDOW]
        self.trained_tokens += update.trained_tokens
        self.stats = stats
        self.last_step_end, self.last_generated = now, stats.tokens_generated
        return StepRecord(
            step=step,
            version=version,
            reward=reward,
            trajectories=len(meta),
            response_tokens=sum(int(tag["response_len"]) for tag in meta.tags),
            trajectories_per_s=len(meta) / max(elapsed, 1e-9),
            tokens_per_s=generated / max(elapsed, 1e-9),
            lag_mean=sum(lags) / max(len(lags), 1),
            lag_max=max(lags, default=0),
            lags=lags,
            step_s=seconds,
            wait_data_s=wait_data_s,
            pending=stats.pending,
            running=stats.running,
            ready=stats.ready,
            leased=stats.leased,
            dropped=sum(stats.dropped.values()),
            metrics=metrics,
        )

    def validated(self, accuracy: float) -> None:
        self.val_accuracies.append(accuracy)
        del self.val_accuracies[1:-1]

    def close(self, stats: ReplayStats) -> None:
        """The ledger's last word: of a closed buffer, and again when every rollout actor has told what its last sessions had written."""
        self.stats = stats

    @property
    def lag_mean(self) -> float:
        """Mean over trained groups, in versions, by the ledger."""
        return self.stats.lag_sum / max(self.stats.trained, 1)

    def token_fates(self) -> dict[str, int]:
        """Where the tokens went that the policy wrote, by the ledger: they sum up to all of them."""
        fates = {fate: self.stats.token_fates.get(fate, 0) for fate in ("trained", "stale", "filtered", "failed", "evaluation")}
        return fates | {"in_flight": self.stats.tokens_in_flight}

    def reward_ends(self) -> tuple[float | None, float | None]:
        """Mean reward of the first and of the last steps (``REWARD_WINDOW`` each, at most half of the run)."""
        if not self.rewards:
            return None, None
        window = min(REWARD_WINDOW, max(1, len(self.rewards) // 2))
        return sum(self.rewards[:window]) / window, sum(self.rewards[-window:]) / window

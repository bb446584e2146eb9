"""From records and counts to metrics: what the trainer exports a step, what the replay actor exports a second. Decides nothing."""

from __future__ import annotations

from streamrl.pipeline.records import StepRecord
from streamrl.protocol.groups import ReplayStats
from streamrl.protocol.learn import UpdateReport
from streamrl.telemetry.metrics import Metrics

_STEP_GAUGES = {
    "actor/pg_loss": "streamrl_learner_loss",
    "actor/grad_norm": "streamrl_learner_grad_norm",
    "actor/lr": "streamrl_learner_learning_rate",
    "actor/entropy": "streamrl_policy_entropy_nats",
    "rollout_corr/ess_ratio": "streamrl_importance_ess_ratio",
    "rollout_corr/truncated_ratio": "streamrl_importance_truncated_ratio",
    "rollout_corr/rejected_token_ratio": "streamrl_importance_rejected_ratio",
}


def meter_step(metrics: Metrics, record: StepRecord, update: UpdateReport) -> None:
    """Counters and gauges of one training step."""
    metrics.inc("streamrl_learner_steps_total")
    metrics.inc("streamrl_learner_tokens_total", update.trained_tokens)
    metrics.inc("streamrl_learner_groups_total", len(record.lags))
    if not update.applied:
        metrics.inc("streamrl_learner_skipped_steps_total")
    metrics.observe("streamrl_learner_phase_seconds", record.wait_data_s, phase="wait_data")
    for lag in record.lags:
        metrics.observe("streamrl_staleness_versions", lag, stage="train")
    for name, gauge in _STEP_GAUGES.items():
        if name in record.metrics:
            metrics.set(gauge, record.metrics[name])


class ReplayMeter:
    """Exports the replay buffer's counts; counters move by what changed since the last export.

    A rollback takes groups out of ``trained``, and a counter never falls: as counters, admitted = trained - rolled_back + dropped + in flight.
    """

    def __init__(self, metrics: Metrics, max_staleness: int) -> None:
        self._metrics = metrics
        self._last = ReplayStats()
        metrics.set("streamrl_staleness_bound_versions", max_staleness)

    def export(self, stats: ReplayStats) -> None:
        """Gauges as they are, counters by their growth."""
        for state in ("pending", "running", "ready", "leased", "trained_unpublished"):
            self._metrics.set("streamrl_buffer_groups", getattr(stats, state), state=state)
        self._metrics.set("streamrl_buffer_capacity_groups", stats.capacity_groups)
        self._metrics.set("streamrl_buffer_oldest_group_age_seconds", stats.oldest_group_age_s)
        for env, share in stats.zero_variance.items():
            self._metrics.set("streamrl_group_zero_variance_ratio", share, env=env)
        for unit, fields in _LEDGER.items():
            for fate, field in fields.items():
                self._grow(f"streamrl_ledger_{unit}_total", _total(stats, field) - _total(self._last, field), fate=fate)
        for reason, count in stats.dropped.items():
            self._grow("streamrl_groups_dropped_total", count - self._last.dropped.get(reason, 0), reason=reason)
        self._grow("streamrl_buffer_events_total", stats.expired_leases - self._last.expired_leases, event="expired")
        self._grow("streamrl_dataplane_rejected_writes_total", stats.rejected_writes - self._last.rejected_writes, reason="stale_write")
        self._last = stats

    def _grow(self, name: str, amount: int, **labels: str) -> None:
        if amount > 0:
            self._metrics.inc(name, amount, **labels)


_LEDGER = {
    "groups": {"admitted": "admitted", "trained": "trained", "dropped": "dropped", "rolled_back": "rolled_back"},
    "trajectories": {
        "admitted": "trajectories_generated",
        "trained": "trajectories_trained",
        "dropped": "trajectories_dropped",
        "rolled_back": "trajectories_rolled_back",
    },
    "tokens": {"admitted": "tokens_generated", "trained": "tokens_trained", "dropped": "tokens_dropped", "rolled_back": "tokens_rolled_back"},
}


def _total(stats: ReplayStats, field: str) -> int:
    value = getattr(stats, field)
    return sum(value.values()) if isinstance(value, dict) else value

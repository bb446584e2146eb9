"""From records and counts to metrics: what the trainer exports a step, what replay and store actors export a second. Decides nothing.

Counts that an owner keeps anyway are exported as they stand, all at one moment: sums over them hold on every page, also on that of an actor that took
over from another one, and after a rollback. Knows nothing of who scrapes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from streamrl.errors import StreamrlError
from streamrl.pipeline.records import StepRecord
from streamrl.protocol.groups import DROP_REASONS, ReplayStats
from streamrl.protocol.interfaces import Clock
from streamrl.protocol.learn import UpdateReport
from streamrl.protocol.segments import StoreUse
from streamrl.protocol.trajectory import Trajectory
from streamrl.protocol.weights import WeightManifest, WeightReport
from streamrl.telemetry.catalogue import ADMISSION_REASONS, GROUP_OUTCOMES, REJECTED_WRITES, SESSION_OUTCOMES, TOKEN_FATES
from streamrl.telemetry.metrics import MAX_FREE_VALUES, Metrics

log = logging.getLogger(__name__)

EXPORT_S = 1.0  # how old a page of a replay or store actor may be
_STEP_GAUGES: dict[str, tuple[str, dict[str, str]]] = {  # name in a record -> gauge and labels
    "actor/pg_loss": ("streamrl_learner_loss", {}),
    "actor/grad_norm": ("streamrl_learner_grad_norm", {}),
    "actor/lr": ("streamrl_learner_learning_rate", {}),
    "actor/entropy": ("streamrl_policy_entropy_nats", {}),
    "actor/kl_loss": ("streamrl_policy_kl_nats", {"against": "ref"}),
    "actor/reward_kl_penalty": ("streamrl_policy_kl_nats", {"against": "ref"}),
    "rollout_corr/kl": ("streamrl_policy_kl_nats", {"against": "behavior"}),
    "actor/clip_low": ("streamrl_policy_clip_ratio", {"side": "low"}),
    "actor/clip_high": ("streamrl_policy_clip_ratio", {"side": "high"}),
    "rollout_corr/ess_ratio": ("streamrl_importance_ess_ratio", {}),
    "rollout_corr/truncated_ratio": ("streamrl_importance_truncated_ratio", {}),
    "rollout_corr/rejected_token_ratio": ("streamrl_importance_rejected_ratio", {}),
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
    for name, (gauge, labels) in _STEP_GAUGES.items():
        if name in record.metrics:
            metrics.set(gauge, record.metrics[name], **labels)


class _Env:
    """The series of one environment."""

    def __init__(self, metrics: Metrics, env: str) -> None:
        self.outcomes = {outcome: metrics.bound("streamrl_rollout_trajectories_total", env=env, outcome=outcome) for outcome in SESSION_OUTCOMES}
        self.groups = {outcome: metrics.bound("streamrl_rollout_groups_total", env=env, outcome=outcome) for outcome in GROUP_OUTCOMES}
        self.seconds = metrics.bound("streamrl_rollout_session_seconds", env=env)
        self.reward = metrics.bound("streamrl_reward", env=env)


class RolloutMeter:
    """What one rollout worker counts of training sessions. Evaluations do not come by here."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._envs: dict[str, _Env] = {}
        self._prompt, self._completion = (metrics.bound("streamrl_rollout_tokens_total", kind=kind) for kind in ("prompt", "completion"))
        self._versions = metrics.bound("streamrl_trajectory_versions_spanned")

    def session(self, env: str, rows: list[Trajectory], seconds: float) -> None:
        """A good one; its rows are acknowledged."""
        series = self._env(env)
        series.seconds.observe(seconds)
        for row in rows:
            series.outcomes["truncated" if row.stop_reason == "length" else "completed"].inc(1)
            self._prompt.inc(len(row.prompt_ids))
            self._completion.inc(sum(row.response_mask))
            self._versions.observe(len(set(row.rollout_versions) - {-1}))
        if rows[-1].reward is not None:
            series.reward.observe(rows[-1].reward)

    def lost(self, env: str, outcome: str) -> None:
        """A session that gave no row: ``failed`` or ``cancelled``."""
        self._env(env).outcomes[outcome].inc(1)

    def group(self, env: str, outcome: str) -> None:
        self._env(env).groups[outcome].inc(1)

    def _env(self, env: str) -> _Env:
        known = self._envs.get(env)
        if known is None:
            known = _Env(self._metrics, env)
            if len(self._envs) < MAX_FREE_VALUES:
                self._envs[env] = known
        return known


def meter_load(metrics: Metrics, manifest: WeightManifest, report: WeightReport, running: int, transport: str) -> None:
    """An engine holds ``manifest``; ``running`` answers went on under it."""
    metrics.set("streamrl_weight_version", manifest.version)
    metrics.set("streamrl_weight_last_sync_timestamp_seconds", time.time())
    metrics.observe("streamrl_weight_sync_seconds", report.load_s, stage="load")
    metrics.observe("streamrl_weight_sync_seconds", report.pause_s, stage="pause")
    metrics.inc("streamrl_weight_sync_bytes_total", manifest.total_bytes, transport=transport)
    metrics.inc("streamrl_rollout_resumes_total", running, cause="weight_push")


async def export_every(read: Callable[[], Awaitable[None]], clock: Clock, seconds: float = EXPORT_S) -> None:
    """Consumes: counts. Produces: their metrics. Waits for: the clock. A read that fails is tried again: its owner has its own say about that."""
    while True:
        try:
            await read()
        except StreamrlError as error:
            log.debug("counts could not be read for the metrics page: %s", error)
        await clock.sleep(seconds)


class ReplayMeter:
    """Exports the replay buffer's counts.

    A rollback takes groups out of ``trained``, and a counter does not fall: what is exported as trained is all that ever was, so that as counters
    admitted = trained - rolled_back + dropped + in flight, and generated tokens = trained - rolled_back + the other fates + in flight.
    """

    def __init__(self, metrics: Metrics, max_staleness: int) -> None:
        self._metrics = metrics
        metrics.set("streamrl_staleness_bound_versions", max_staleness)

    def export(self, stats: ReplayStats) -> None:
        """Everything as it stands, at one moment."""
        with self._metrics.whole():
            self._buffer(stats)
            self._ledger(stats)
            self._tokens(stats)

    def _buffer(self, stats: ReplayStats) -> None:
        for state in ("pending", "running", "ready", "leased", "trained_unpublished"):
            self._metrics.set("streamrl_buffer_groups", getattr(stats, state), state=state)
        self._metrics.set("streamrl_buffer_capacity_groups", stats.capacity_groups)
        self._metrics.set("streamrl_buffer_oldest_group_age_seconds", stats.oldest_group_age_s)
        for reason in ADMISSION_REASONS:
            self._metrics.set("streamrl_admission_blocked", float(stats.admission_blocked == reason), reason=reason)
        for env, share in stats.zero_variance.items():
            self._metrics.set("streamrl_group_zero_variance_ratio", share, env=env)
        events = {
            **stats.events,
            "inserted": stats.admitted,
            "consumed": stats.trained + stats.rolled_back,
            "expired": stats.expired_leases,
        }
        self._totals("streamrl_buffer_events_total", "event", events)

    def _ledger(self, stats: ReplayStats) -> None:
        back = (stats.rolled_back, stats.trajectories_rolled_back, stats.tokens_rolled_back)
        admitted = (stats.admitted, stats.trajectories_generated, stats.tokens_generated)
        trained = (stats.trained, stats.trajectories_trained, stats.tokens_trained)
        dropped = tuple(sum(by_reason.values()) for by_reason in (stats.dropped, stats.trajectories_dropped, stats.tokens_dropped))
        for place, unit in enumerate(("groups", "trajectories", "tokens")):
            fates = {"admitted": admitted[place], "trained": trained[place] + back[place], "dropped": dropped[place], "rolled_back": back[place]}
            self._totals(f"streamrl_ledger_{unit}_total", "fate", fates)
        self._totals("streamrl_groups_dropped_total", "reason", {reason: stats.dropped.get(reason, 0) for reason in DROP_REASONS})
        self._totals("streamrl_dataplane_rejected_writes_total", "reason", {"stale_write": stats.rejected_writes})
        self._metrics.total("streamrl_staleness_violations_total", stats.staleness_violations)

    def _tokens(self, stats: ReplayStats) -> None:
        back = stats.generated_tokens_rolled_back
        fates = {fate: stats.token_fates.get(fate, 0) for fate in TOKEN_FATES}
        self._totals("streamrl_token_fate_total", "fate", fates | {"trained": fates["trained"] + back, "rolled_back": back})
        self._metrics.total("streamrl_tokens_generated_total", stats.generated_tokens)
        self._metrics.set("streamrl_tokens_in_flight", stats.tokens_in_flight)

    def _totals(self, name: str, label: str, values: Mapping[str, int]) -> None:
        for value, total in values.items():
            self._metrics.total(name, total, **{label: value})


class StoreMeter:
    """Exports a store's use of memory, and the writes that it refused."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def export(self, use: StoreUse) -> None:
        """As it stands."""
        with self._metrics.whole():
            self._metrics.set("streamrl_dataplane_live_bytes", use.bytes_live)
            self._metrics.set("streamrl_dataplane_allocated_bytes", use.bytes_allocated)
            self._metrics.set("streamrl_dataplane_spilled_bytes", use.bytes_spilled)
            self._metrics.set("streamrl_buffer_bytes", use.bytes_allocated)
            self._metrics.set("streamrl_buffer_capacity_bytes", use.capacity_bytes)
            for reason in REJECTED_WRITES:
                self._metrics.total("streamrl_dataplane_rejected_writes_total", use.rejected.get(reason, 0), reason=reason)

"""What the replay actor and the trainer export."""

from __future__ import annotations

from streamrl.pipeline.metering import ReplayMeter, meter_step
from streamrl.pipeline.records import StepRecord
from streamrl.protocol.groups import ReplayStats
from streamrl.protocol.learn import UpdateReport
from streamrl.telemetry.metrics import Metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_replay_counters_follow_the_ledger_however_often_they_are_exported():
    metrics = Metrics("replay", "replay")
    meter = ReplayMeter(metrics, max_staleness=1)
    stats = ReplayStats(admitted=5, trained=2, dropped={"stale": 1}, ready=2, tokens_generated=40, tokens_dropped={"stale": 8})
    meter.export(stats)
    meter.export(stats)
    assert value(metrics, "streamrl_ledger_groups_total", fate="admitted") == 5
    assert value(metrics, "streamrl_ledger_tokens_total", fate="dropped") == 8
    assert value(metrics, "streamrl_groups_dropped_total", reason="stale") == 1
    assert value(metrics, "streamrl_buffer_groups", state="ready") == 2
    assert value(metrics, "streamrl_staleness_bound_versions") == 1


def test_after_a_rollback_the_counters_still_add_up_and_the_filtered_share_has_its_environment():
    metrics = Metrics("replay", "replay")
    meter = ReplayMeter(metrics, max_staleness=1)
    meter.export(ReplayStats(admitted=10, trained=8, ready=2, trajectories_generated=10, trajectories_trained=8))
    meter.export(ReplayStats(admitted=10, trained=5, rolled_back=3, ready=5, trajectories_generated=10, trajectories_trained=5, trajectories_rolled_back=3))
    stats = ReplayStats(admitted=10, trained=7, rolled_back=3, ready=3, trajectories_generated=10, trajectories_trained=7, trajectories_rolled_back=3)
    stats.zero_variance = {"math": 0.25}
    meter.export(stats)
    for unit in ("groups", "trajectories"):
        admitted, trained, back = (value(metrics, f"streamrl_ledger_{unit}_total", fate=fate) for fate in ("admitted", "trained", "rolled_back"))
        assert admitted - trained + back == 3  # ready
    assert value(metrics, "streamrl_group_zero_variance_ratio", env="math") == 0.25


def test_a_step_is_counted_once_and_a_skipped_one_is_marked():
    metrics = Metrics("trainer", "trainer")
    record = StepRecord(step=1, version=1, lags=[0, 1], metrics={"actor/pg_loss": 0.5, "actor/grad_norm": 2.0})
    meter_step(metrics, record, UpdateReport(applied=1, skipped=0, trained_tokens=7))
    meter_step(metrics, record, UpdateReport(applied=0, skipped=1))
    assert value(metrics, "streamrl_learner_steps_total") == 2
    assert value(metrics, "streamrl_learner_skipped_steps_total") == 1
    assert value(metrics, "streamrl_learner_tokens_total") == 7
    assert value(metrics, "streamrl_learner_loss") == 0.5
    assert value(metrics, "streamrl_staleness_versions_count", stage="train") == 4

"""Metrics: declared, bounded, harmless."""

import asyncio
import socket
import urllib.request

import pytest

from streamrl.telemetry.catalogue import CATALOGUE, ROLES
from streamrl.telemetry.metrics import Metrics, NullMetrics


def samples(metrics: Metrics) -> dict[str, float]:
    lines = [line for line in metrics.page().decode().splitlines() if not line.startswith("#")]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_counters_with_enum_labels_exist_at_zero():
    page = samples(Metrics("replay", "replay", strict=True))
    assert page['streamrl_groups_dropped_total{reason="stale"}'] == 0
    assert page['streamrl_ledger_groups_total{fate="trained"}'] == 0


def test_increments_are_on_the_page_at_once():
    metrics = Metrics("replay", "replay", strict=True)
    metrics.inc("streamrl_groups_dropped_total", reason="stale")
    metrics.inc("streamrl_groups_dropped_total", 2, reason="stale")
    metrics.set("streamrl_buffer_groups", 5, state="ready")
    page = samples(metrics)
    assert page['streamrl_groups_dropped_total{reason="stale"}'] == 3
    assert page['streamrl_buffer_groups{state="ready"}'] == 5


def test_two_objects_in_one_process_do_not_meet():
    first, second = Metrics("trainer", "t", strict=True), Metrics("trainer", "t", strict=True)
    first.inc("streamrl_learner_steps_total")
    assert samples(second)["streamrl_learner_steps_total"] == 0


@pytest.mark.parametrize(
    "write",
    [
        lambda m: m.inc("streamrl_no_such_total"),
        lambda m: m.inc("streamrl_groups_dropped_total", reason="boredom"),
        lambda m: m.inc("streamrl_groups_dropped_total"),
        lambda m: m.set("streamrl_learner_steps_total", 3),
        lambda m: m.inc("streamrl_learner_steps_total", -1),
        lambda m: m.set("streamrl_learner_loss", None),
        lambda m: m.state("sleeping"),
    ],
    ids=["undeclared", "value outside the enum", "missing label", "wrong kind", "negative", "no number", "unknown state"],
)
def test_a_wrong_write_raises_in_tests_and_is_counted_in_a_run(write):
    with pytest.raises(ValueError):
        write(Metrics("trainer", "t", strict=True))
    lenient = Metrics("trainer", "t", strict=False)
    write(lenient)
    assert sum(value for name, value in samples(lenient).items() if name.startswith("streamrl_telemetry_errors_total")) == 1


@pytest.mark.parametrize("rollouts", [1_000, 10_000])
def test_free_labels_stop_at_twenty_values_and_series_do_not_grow(rollouts):
    metrics = Metrics("rollout", "r", strict=True)
    for i in range(rollouts):
        metrics.inc("streamrl_rollout_trajectories_total", env=f"env{i}", outcome="completed")
    page = samples(metrics)
    mine = {name: value for name, value in page.items() if name.startswith("streamrl_rollout_trajectories_total")}
    assert len(mine) == 21 and sum(mine.values()) == rollouts
    assert mine['streamrl_rollout_trajectories_total{env="other",outcome="completed"}'] == rollouts - 20
    assert len(page) < 200
    assert len(metrics._series) < 50


def test_five_actors_stay_within_the_series_budget_before_data_arrives():
    total = sum(len(samples(Metrics(role, role, strict=True))) for role in ROLES)
    assert total < 500


def test_weighted_histogram_counts_tokens_not_calls():
    metrics = Metrics("trainer", "t", strict=True)
    metrics.observe("streamrl_token_version_lag", 0, times=30)
    metrics.observe("streamrl_token_version_lag", 2, times=10)
    page = samples(metrics)
    assert page['streamrl_token_version_lag_bucket{le="0.0"}'] == 30
    assert page['streamrl_token_version_lag_bucket{le="2.0"}'] == 40
    assert page["streamrl_token_version_lag_count"] == 40
    assert page["streamrl_token_version_lag_sum"] == 20


def test_reward_histogram_has_no_sum_so_means_have_a_gauge():
    metrics = Metrics("rollout", "r", strict=True)
    metrics.observe("streamrl_reward", -0.5, env="math")
    assert not any(name.startswith("streamrl_reward_sum") for name in samples(metrics))
    assert "streamrl_batch_reward_mean" in CATALOGUE


def test_staleness_histogram_has_a_bucket_for_zero():
    metrics = Metrics("trainer", "t", strict=True)
    metrics.observe("streamrl_staleness_versions", 0, stage="train")
    assert samples(metrics)['streamrl_staleness_versions_bucket{le="0.0",stage="train"}'] == 1


def test_states_add_up_to_wall_time_with_overlapping_tasks():
    now = [0.0]
    metrics = Metrics("rollout", "r", strict=True, now=lambda: now[0])

    async def session(name: str, start: float, end: float):
        while now[0] < start:
            await asyncio.sleep(0)
        with metrics.state(name):
            while now[0] < end:
                await asyncio.sleep(0)

    async def run():
        tasks = [asyncio.create_task(session(*s)) for s in (("generate", 1, 4), ("generate", 2, 6), ("reward", 3, 8), ("wait_admission", 0, 9))]
        for second in range(1, 12):
            for _ in range(10):
                await asyncio.sleep(0)
            now[0] = float(second)
        await asyncio.gather(*tasks)

    asyncio.run(run())
    seconds = metrics.seconds_by_state()
    assert sum(seconds.values()) == pytest.approx(11.0)
    assert seconds["generate"] == 5 and seconds["reward"] == 2 and seconds["wait_admission"] == 2 and seconds["idle"] == 2


def test_page_is_served_on_a_free_port_and_ends_with_close():
    metrics = Metrics("trainer", "t", strict=True)
    port = metrics.serve("127.0.0.1")
    metrics.inc("streamrl_learner_steps_total")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        assert "streamrl_learner_steps_total 1.0" in page.read().decode()
    metrics.close()
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        pass


def test_an_exporter_that_cannot_start_does_not_end_the_run():
    metrics = Metrics("trainer", "t", strict=True)
    assert metrics.serve("203.0.113.7") == 0
    assert samples(metrics)['streamrl_telemetry_errors_total{kind="exporter"}'] == 1


def test_null_metrics_accept_everything():
    null = NullMetrics()
    null.inc("whatever", reason="x")
    with null.state("generate"):
        null.observe("anything", 3.0)
    assert null.serve() == 0


@pytest.mark.parametrize("spec", CATALOGUE.values(), ids=lambda spec: spec.name)
def test_declarations_follow_the_naming_rules(spec):
    assert spec.name.startswith("streamrl_") and spec.help and spec.roles
    assert spec.name.endswith("_total") == (spec.kind == "counter")
    assert bool(spec.buckets) == (spec.kind in ("histogram", "weighted_histogram"))
    for unit in ("seconds", "bytes", "ratio", "nats"):
        if spec.unit == unit:
            assert f"_{unit}" in spec.name
    assert not set(spec.labels) & {"uid", "session", "trajectory", "prompt", "version", "pid", "error", "path"}

"""Metrics: declared, bounded, harmless."""

import asyncio
import gc
import importlib.util
import inspect
import re
import socket
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from streamrl.engines import vllm_settings
from streamrl.learner.judge_metrics import session_metrics
from streamrl.pipeline.metering import meter_step
from streamrl.pipeline.records import StepRecord
from streamrl.protocol.clock import SystemClock
from streamrl.protocol.learn import UpdateReport
from streamrl.rollout.parsers.base import ToolCall
from streamrl.rollout.session_metrics import SessionMetrics
from streamrl.rollout.tools import AgentData
from streamrl.rollout.tools.session import ToolSession
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
    metrics = Metrics("learner", "t", strict=True)
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


def test_a_gauge_that_nobody_set_has_no_value():
    metrics = Metrics("trainer", "t", strict=True)
    assert "streamrl_eval_accuracy_ratio" not in samples(metrics)
    metrics.set("streamrl_eval_accuracy_ratio", 0)
    assert samples(metrics)["streamrl_eval_accuracy_ratio"] == 0


def test_a_total_is_exported_as_it_stands_and_falls_only_with_its_owner():
    metrics = Metrics("replay", "replay", strict=True)
    for total in (5, 5, 8):
        metrics.total("streamrl_tokens_generated_total", total)
        assert samples(metrics)["streamrl_tokens_generated_total"] == total
    metrics.total("streamrl_tokens_generated_total", 2)  # restored from an older checkpoint
    assert samples(metrics)["streamrl_tokens_generated_total"] == 2


def test_a_page_shows_all_of_a_whole_block_or_nothing_whoever_reads_meanwhile():
    metrics = Metrics("replay", "replay", strict=True)
    stop, torn = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            page = samples(metrics)
            if page["streamrl_tokens_generated_total"] != page['streamrl_token_fate_total{fate="stale"}'] + page.get("streamrl_tokens_in_flight", 0):
                torn.append(page)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for count in range(300):
        with metrics.whole():
            metrics.total("streamrl_tokens_generated_total", 2 * count)
            metrics.total("streamrl_token_fate_total", count, fate="stale")
            time.sleep(0)  # let a reader try
            metrics.set("streamrl_tokens_in_flight", count)
    stop.set()
    for reader in readers:
        reader.join()
    assert not torn


def test_concurrent_updates_are_all_on_the_page():
    metrics = Metrics("rollout", "r", strict=True)

    def work(number: int) -> None:
        for i in range(2_000):
            metrics.inc("streamrl_rollout_tokens_total", 2, kind="completion")
            metrics.observe("streamrl_tool_call_seconds", 0.1, tool=f"tool{(number + i) % 3}")
            with metrics.state("generate"):
                pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    pages = [samples(metrics) for _ in range(20)]
    for thread in threads:
        thread.join()
    page = samples(metrics)
    assert page['streamrl_rollout_tokens_total{kind="completion"}'] == 16_000
    assert sum(page[f'streamrl_tool_call_seconds_count{{tool="tool{i}"}}'] for i in range(3)) == 8_000
    assert metrics.blocks_in("generate") == 0
    counts = [page['streamrl_rollout_tokens_total{kind="completion"}'] for page in pages]
    assert counts == sorted(counts)


def test_a_million_updates_grow_neither_the_page_nor_the_memory():
    metrics = Metrics("rollout", "r", strict=True)

    def update(times: int, envs: int) -> None:
        for i in range(times):
            metrics.inc("streamrl_rollout_trajectories_total", env=f"env{i % envs}", outcome="completed")

    update(100, 25)
    page, objects = len(metrics.page()), len(gc.get_objects())
    update(950_000, 18)
    update(50_000, 25)
    assert len(metrics.page()) - page < 400, "digits"
    assert len(gc.get_objects()) - objects < 500


@pytest.mark.parametrize("rollouts", [1_000, 10_000])
def test_ids_and_names_that_a_model_makes_up_never_become_series(rollouts):
    """Each rollout has ids, tool names and arguments of its own."""
    metrics = Metrics("rollout", "r", strict=True)
    toolbox = ReadyToolbox("calculator")

    async def run() -> None:
        for i in range(rollouts):
            session = toolbox.session()
            await session.call([ToolCall(f"made_up_{i}", f'{{"x": {i}}}')])
            told = SessionMetrics(tools=session.times)
            told.report(metrics)
            metrics.inc("streamrl_rollout_trajectories_total", env="math", outcome="completed")
            metrics.observe("streamrl_reward", float(i % 2), env="math")

    asyncio.run(run())
    page = samples(metrics)
    assert page['streamrl_tool_calls_total{outcome="unknown",tool="unknown"}'] == rollouts
    assert len(page) < 200
    assert len(page) == EXPECTED.setdefault("series", len(page)), "the same at 1,000 and at 10,000"


EXPECTED: dict[str, int] = {}


class ReadyToolbox:
    """Sessions with one known tool that is never called."""

    def __init__(self, name: str) -> None:
        self.tools = {name: None}

    def session(self) -> ToolSession:
        data = AgentData("request", [], {})
        return ToolSession(self.tools, tools_kwargs={}, agent_data=data, timeout_s=1.0, max_parallel_calls=1, clock=SystemClock())  # type: ignore[arg-type]


def test_one_process_may_hold_two_actors_of_a_name_and_build_them_again():
    pages = []
    for _ in range(2):  # a notebook that runs its cell again
        metrics = [Metrics("trainer", "trainer", strict=True), Metrics("trainer", "trainer", strict=True)]
        ports = [one.serve() for one in metrics]
        metrics[0].inc("streamrl_learner_steps_total")
        pages.append([samples(one)["streamrl_learner_steps_total"] for one in metrics])
        assert len(set(ports)) == 2 and all(ports)
        for one in metrics:
            one.close()
    assert pages == [[1, 0], [1, 0]]


def test_a_library_that_counts_in_this_process_is_on_the_page_by_its_prefix():
    """As vLLM does, in the default registry."""
    theirs = CollectorRegistry()
    Gauge("vllm:num_requests_running", "Requests", ["engine"], registry=theirs).labels("0").set(7)
    Gauge("python_info_of_theirs", "Not asked for", registry=theirs)
    metrics = Metrics("rollout", "r", strict=True)
    metrics.include("vllm:", theirs)
    page = samples(metrics)
    assert page['vllm:num_requests_running{engine="0"}'] == 7
    assert not any(name.startswith("python_info") for name in page) and "streamrl_tool_parse_errors_total" in page


@pytest.mark.parametrize("accept", ["*/*", "text/plain;version=0.0.4", "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"])
def test_names_keep_their_colon_for_whoever_asks_over_http(accept):
    theirs = CollectorRegistry()
    Gauge("vllm:num_requests_running", "Requests", registry=theirs).set(7)
    metrics = Metrics("rollout", "r", strict=True)
    metrics.include("vllm:", theirs)
    request = urllib.request.Request(f"http://127.0.0.1:{metrics.serve()}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=5) as page:
        text = page.read().decode()
    metrics.close()
    assert "\nvllm:num_requests_running 7.0\n" in text and ("# EOF" in text) == ("openmetrics" in accept)


def test_a_library_whose_metrics_fail_costs_its_part_of_the_page():
    class Broken(CollectorRegistry):
        def collect(self):
            raise RuntimeError("theirs")

    metrics = Metrics("rollout", "r", strict=False)
    metrics.include("vllm:", Broken())
    assert "streamrl_tool_parse_errors_total" in samples(metrics)
    assert samples(metrics)['streamrl_telemetry_errors_total{kind="exporter"}'] >= 1


def test_vllm_counts_in_the_default_registry_under_names_that_the_page_asks_for():
    """Read from its source, without starting it."""
    source = importlib.util.find_spec("vllm")
    if source is None:
        pytest.skip("vllm is not installed")
    folder = Path(source.submodule_search_locations[0]) / "v1" / "metrics"
    loggers, registry = (folder / "loggers.py").read_text(), (folder / "prometheus.py").read_text()
    names = re.findall(r'name="(vllm:[^"]+)"', loggers)
    assert {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"} <= set(names)
    assert "registry=" not in loggers, "the default one"
    assert "return REGISTRY" in registry


def test_vllm_keeps_count_and_names_its_model_without_a_path():
    assert vllm_settings.METRICS == {"disable_log_stats": False, "served_model_name": "policy"}
    assert "| METRICS |" in inspect.getsource(vllm_settings.engine_args)


def test_extra_metrics_that_only_some_workers_report_have_their_own_counts():
    """One sample has a and b, one lacks b, one has c instead: the union of the names, the mean over what is there, missing is not 0."""
    found = session_metrics([2, 2, 2], [{"a": 1.0, "b": 4.0}, {"a": 3.0}, {"a": 2.0, "c": 5.0, "note": "text", "b": None}])
    assert found["reward_extra/a/mean"] == 2.0 and found["reward_extra/b/mean"] == 4.0 and found["reward_extra/c/mean"] == 5.0
    assert "reward_extra/note/mean" not in found
    one, other = StepRecord(step=1, version=1, metrics={"actor/lr": 0.5}), StepRecord(step=2, version=2, metrics={"actor/grad_norm": 2.0})
    metrics = Metrics("trainer", "t", strict=True)
    for record in (one, other):
        meter_step(metrics, record, UpdateReport(applied=1, skipped=0))
    page = samples(metrics)
    assert page["streamrl_learner_learning_rate"] == 0.5 and page["streamrl_learner_grad_norm"] == 2.0 and "streamrl_learner_loss" not in page


def test_a_high_quantile_of_a_bucketed_histogram_is_no_bound():
    """Everything at 5 lies in the bucket up to 6: an interpolated p95 shows what was never seen. The bound is watched by its own counter."""
    metrics = Metrics("trainer", "t", strict=True)
    for _ in range(100):
        metrics.observe("streamrl_staleness_versions", 5, stage="train")
    page = samples(metrics)
    below, above = page['streamrl_staleness_versions_bucket{le="4.0",stage="train"}'], page['streamrl_staleness_versions_bucket{le="6.0",stage="train"}']
    assert 4 + (6 - 4) * (95 - below) / (above - below) == pytest.approx(5.9)
    assert "streamrl_staleness_violations_total" in page


def test_the_weighted_histogram_takes_a_million_tokens_in_one_call():
    metrics = Metrics("learner", "l", strict=True)
    metrics.observe("streamrl_token_version_lag", 1, times=1_000_000)
    assert samples(metrics)["streamrl_token_version_lag_count"] == 1_000_000
    with pytest.raises(ValueError):
        metrics.observe("streamrl_token_version_lag", 1, times=-1)

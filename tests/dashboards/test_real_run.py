"""A real run under a real Prometheus: everything that dashboards, rules and alerts ask has an answer there; and again from the run's recording.

One launch for all tests: multi-turn tool calls, several versions, checkpoints, validations, groups dropped by the filter, and a rollout actor that
is killed and restarted. Prometheus and recorder read the pages every second, so that a short run gives rates.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from streamrl.telemetry.metrics import Metrics
from streamrl.telemetry.recording import read_recording
from streamrl.telemetry.targets import Target, write_targets
from tests.actors.jobs import ROOT, Job
from tests.dashboards import live
from tests.dashboards.checker import FILES, charts
from tests.dashboards.faults import LIVE, broken
from tests.dashboards.prometheus import Prometheus, needs_prometheus, promtool
from tests.dashboards.recorded import as_another_run, openmetrics, write_blocks

pytestmark = [needs_prometheus, pytest.mark.ray]

CONFIG = ROOT / "configs" / "tiny_tools_cpu.yaml"
STEPS = 5
OVERRIDES = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=2",
    "trainer.test_freq=3",
    "data.train_batch_size=16",
    "actor.ppo_mini_batch_size=16",
    "data.val_max_samples=16",
    "algorithm.filter_groups.enable=true",
    "telemetry.record_interval_s=1",
    "run.seed=7",
)
PATIENCE_S = 10.0  # Prometheus takes changes of its targets up every 5 s
every_board = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


@dataclass
class RealRun:
    folder: Path
    window: live.Window
    pages: dict[str, bytes]  # actor -> what it served in the middle of the run
    killed: str  # host:port of the page of the actor that was killed
    changed_at: float  # when it was, and when the other run took its actor off its list


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[RealRun]:
    base = tmp_path_factory.mktemp("seen")
    folder, lists = base / "run", [base / "run" / "metrics" / "targets.json", base / "other.json"]
    other = Metrics("rollout", "rollout-7")
    write_targets(lists[1], "other", [Target("rollout", "rollout-7", "127.0.0.1", other.serve())])
    prometheus = Prometheus(base / "data", targets=lists, rules=sorted(live.RULES.glob("*.yml")))
    started = time.time()
    job = Job(folder, f"--run-dir={folder}", *OVERRIDES, config=CONFIG)
    try:
        job.until(lambda: len(job.trained_steps()) >= 2)
        addresses = page_addresses(folder)
        pages = {actor: read_page(address) for actor, address in addresses.items()}
        job.kill("rollout-0")
        write_targets(lists[1], "other", [])
        changed_at = time.time()
        assert job.wait(120) == 0, job.output[-3000:]
        (name,) = prometheus.label_values("run", "streamrl_learner_steps_total", started, time.time())
        yield RealRun(folder, live.Window(prometheus, name, started, time.time()), pages, addresses["rollout-0"], changed_at)
    finally:
        job.end()
        other.close()
        prometheus.close()


def page_addresses(folder: Path) -> dict[str, str]:
    """Actor -> host:port."""
    targets = json.loads((folder / "metrics" / "targets.json").read_text())
    return {entry["labels"]["actor"]: entry["targets"][0] for entry in targets}


def read_page(address: str) -> bytes:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        return bytes(answer.read())


def board(path: Path) -> dict:
    return json.loads(path.read_text())


@every_board
def test_every_query_and_variable_of_a_dashboard_has_an_answer(run, path):
    assert live.problems(board(path), run.window) == []


def test_every_rule_works_and_what_alerts_read_exists(run):
    assert list(live.rule_problems(run.window)) == []


def test_a_healthy_run_raises_no_alert(run):
    """Those without patience at no moment, the ledger included: its counts on a page are of one moment."""
    window = run.window
    assert window.prometheus.range('ALERTS{alertstate="firing"}', window.start, window.end) == []
    for name in ("StalenessAboveBound", "WeightSyncStalled", "NothingTrained", "LedgerImbalance"):
        assert window.prometheus.range(live.alerts()[name], window.start, window.end) == [], name


@pytest.mark.parametrize("fault", LIVE)
def test_the_checker_finds(run, fault):
    throughput = board(next(path for path in FILES if path.stem == "streamrl-throughput"))
    assert live.problems(broken(throughput, LIVE[fault]), run.window) != []


def test_every_page_is_what_promtool_takes(run):
    assert set(run.pages) == {"driver", "prompt", "replay", "store", "trainer", "learner-0", "rollout-0"}
    for actor, page in run.pages.items():
        done = promtool("check", "metrics", stdin=page)
        assert (done.returncode, done.stdout + done.stderr) == (0, ""), actor


def test_the_series_of_a_killed_actor_end(run):
    """Its successor has a page of its own; in between there is nothing."""
    ends = last_seen(run, run.window.run, "rollout-0")
    assert len(ends) == 2 and ends[run.killed] - run.changed_at < PATIENCE_S


def test_the_series_of_an_actor_that_leaves_the_list_end_though_its_page_answers(run):
    (end,) = last_seen(run, "other", "rollout-7").values()
    assert end - run.changed_at < PATIENCE_S


def last_seen(run: RealRun, name: str, actor: str) -> dict[str, float]:
    """host:port of an actor's pages -> when they last gave a value."""
    window = run.window
    series = window.prometheus.range(f'up{{run="{name}",actor="{actor}"}}', window.start, window.end, 0.5)
    return {each["metric"]["instance"]: float(each["values"][-1][0]) for each in series}


def test_a_recorded_run_is_opened_in_prometheus_and_another_one_beside_it_changes_nothing(run, tmp_path):
    text = openmetrics(read_recording(run.folder / "metrics"))
    other = as_another_run(text, "other")
    write_blocks(text, tmp_path / "alone")
    write_blocks(text, tmp_path / "both")
    write_blocks(other, tmp_path / "both")
    alone, both = Prometheus(tmp_path / "alone"), Prometheus(tmp_path / "both")
    try:
        mine, beside, theirs = (
            live.Window(prometheus, name, run.window.start, run.window.end)
            for prometheus, name in ((alone, run.window.run), (both, run.window.run), (both, "other"))
        )
        for path in FILES:
            assert live.problems(board(path), mine) == []
            for panel in charts(board(path)):
                for target in panel["targets"]:
                    assert beside.ask(target) == mine.ask(target), panel["title"]
                    assert bool(theirs.ask(target)) == bool(mine.ask(target)), panel["title"]
    finally:
        alone.close()
        both.close()

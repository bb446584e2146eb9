"""`streamrl launch` on a local Ray with the shipped tiny model: runs, deaths, stops, resumes."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request

import psutil
import pytest

from tests.actors.jobs import SMALL, Job, shared_memory_of

pytestmark = pytest.mark.ray
LONG = tuple("trainer.total_training_steps=400" if item.startswith("trainer.total") else item for item in SMALL)


@pytest.fixture
def launch(tmp_path):
    jobs: list[Job] = []

    def start(*arguments: str, name: str = "run", **options) -> Job:
        folder = [] if "--resume" in arguments else [f"--run-dir={tmp_path / name}"]
        job = Job(tmp_path / name, *folder, *arguments, **options)
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        job.end()


def test_a_run_trains_validates_saves_and_leaves_nothing_behind(launch):
    job = launch(*SMALL, "trainer.save_freq=2")
    targets = job.until(lambda: len(found := json.loads((job.folder / "metrics" / "targets.json").read_text())) >= 7 and found)
    pages = {entry["labels"]["actor"]: urllib.request.urlopen(f"http://{entry['targets'][0]}/metrics").read().decode() for entry in targets}
    health = job.until(lambda: all(job.health(a) for a in pages if a != "driver") and json.loads((job.folder / "waits.json").read_text())["actors"])
    assert job.wait() == 0, job.output

    assert set(pages) == {"driver", "store", "replay", "prompt", "learner-0", "rollout-0", "trainer"}
    assert all("streamrl_" in page for page in pages.values())
    assert {name for name, h in health.items() if h["imports_torch"]} <= {"prompt", "learner-0", "rollout-0"}

    summary = job.summary()
    assert summary["status"] == "completed" and summary["steps"] == 3 and summary["weight_version"] == 3
    assert summary["groups_trained"] == 48 and summary["lag_max"] <= summary["max_staleness"] == 1
    assert summary["val_accuracy_first"] is not None and summary["val_accuracy_last"] is not None
    assert job.trained_steps() == [1, 2, 3]
    assert sorted(p.name for p in (job.folder / "checkpoints").glob("global_step_*")) == ["global_step_2", "global_step_3"]
    assert (job.folder / "config.yaml").exists()
    assert shared_memory_of(job.folder) == []
    assert not [pid for h in health.values() if h and psutil.pid_exists(pid := h["pid"]) and _is_worker(pid)]


def _is_worker(pid: int) -> bool:
    try:
        return "ray::" in " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def test_a_killed_rollout_actor_is_replaced_and_no_group_is_trained_twice(launch):
    job = launch(*[item.replace("=3", "=12") if item.startswith("trainer.total") else item for item in SMALL])
    job.until(lambda: len(job.trained_steps()) >= 2)
    job.kill("rollout-0")
    assert job.wait(200) == 0, job.output
    summary = job.summary()
    assert job.trained_steps() == list(range(1, 13))
    assert summary["groups_trained"] == 12 * 16 and summary["lag_max"] <= 1
    assert "rollout-0 died" in job.output


def test_an_actor_that_may_not_be_restarted_ends_the_run_with_one_clear_error_and_resume_goes_on_with_its_rows(launch):
    job = launch(*LONG, "trainer.save_freq=2", "cluster.max_restarts=0")
    job.until(lambda: len(job.trained_steps()) >= 3)
    killed = time.monotonic()
    job.kill("learner-0")
    assert job.wait(60) == 1, job.output
    assert time.monotonic() - killed < 30
    assert "learner-0" in job.output.splitlines()[-1] or "learner-0" in job.summary()["error"]
    assert "Traceback" not in job.output and "--resume" in job.output
    assert [name for name in shared_memory_of(job.folder) if not name.endswith("-weights")]  # the rows wait for the resumed run
    saved = max(int(p.name.rsplit("_", 1)[1]) for p in (job.folder / "checkpoints").glob("global_step_*"))
    again = launch("--resume", str(job.folder), f"trainer.total_training_steps={saved + 2}", config=None)
    assert again.wait() == 0, again.output
    summary = job.summary()
    assert summary["status"] == "completed" and summary["steps"] == saved + 2
    assert "0 groups lost rows" in job.folder.joinpath("logs", "replay.log").read_text()
    assert shared_memory_of(job.folder) == []


def test_ctrl_c_saves_and_ends_in_order_within_20_s_and_a_second_one_ends_at_once(launch):
    job = launch(*LONG, name="once")
    job.until(lambda: len(job.trained_steps()) >= 2)
    os.kill(job.process.pid, signal.SIGINT)
    asked = time.monotonic()
    assert job.wait(60) == 130, job.output
    assert time.monotonic() - asked < 20
    assert job.summary()["status"] == "stopped"
    assert list((job.folder / "checkpoints").glob("global_step_*"))
    assert shared_memory_of(job.folder) == []

    job = launch(*LONG, name="twice")
    job.until(lambda: len(job.trained_steps()) >= 1)
    os.kill(job.process.pid, signal.SIGINT)
    time.sleep(0.2)
    os.kill(job.process.pid, signal.SIGINT)
    asked = time.monotonic()
    assert job.wait(30) == 130
    assert time.monotonic() - asked < 5

"""`streamrl launch` on a local Ray with the shipped tiny model: runs, stops, resumes. Deaths that a run survives are in ``test_survival.py``."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import NamedTuple

import psutil
import pytest

from streamrl.cli.audit import audit
from tests.actors.jobs import ROWS, SMALL, TINY, Job, clear, shared_memory_of

pytestmark = pytest.mark.ray
LONG = ("trainer.total_training_steps=400", *ROWS)
Launch = Callable[..., Job]


@pytest.fixture(scope="module")
def launch(tmp_path_factory) -> Iterator[Launch]:
    """Runs that tests of this module share where one run shows several things."""
    jobs: list[Job] = []

    def start(*arguments: str, of: Job | None = None) -> Job:
        """A new run, or with ``of`` a resumed one."""
        folder = of.folder if of else tmp_path_factory.mktemp("launch") / "run"
        words = ("--resume", str(folder)) if of else (f"--run-dir={folder}",)
        jobs.append(Job(folder, *words, *arguments, config=None if of else TINY))
        return jobs[-1]

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


@pytest.fixture(scope="module")
def failed(launch) -> tuple[Job, float]:
    """A run whose learner was killed although none may be restarted, and the seconds until it ended."""
    job = launch(*LONG, "trainer.save_freq=2", "cluster.max_restarts=0")
    job.until(lambda: len(job.trained_steps()) >= 3)
    killed = time.monotonic()
    job.kill("learner-0")
    assert job.wait(60) == 1, job.output
    return job, time.monotonic() - killed


def test_an_actor_that_may_not_be_restarted_ends_the_run_with_one_clear_error(failed):
    job, ended_s = failed
    assert ended_s < 30
    assert "learner-0" in job.output.splitlines()[-1] or "learner-0" in job.summary()["error"]
    assert "Traceback" not in job.output and "--resume" in job.output


class Resumed(NamedTuple):
    saved: int  # the step of the checkpoint that it went on from
    steps: list[int]  # trained after it
    ended_s: float  # after a second Ctrl-C


@pytest.fixture(scope="module")
def resumed(launch, failed) -> Iterator[Resumed]:
    job, _ = failed
    assert [name for name in shared_memory_of(job.folder) if not name.endswith("-weights")]  # the rows wait for the resumed run
    saved = max(int(path.name.rsplit("_", 1)[1]) for path in (job.folder / "checkpoints").glob("global_step_*"))
    before = len(job.trained_steps())
    job = launch(of=job)
    job.until(lambda: len(job.trained_steps()) >= before + 2)
    os.kill(job.process.pid, signal.SIGINT)
    time.sleep(0.2)
    os.kill(job.process.pid, signal.SIGINT)
    asked = time.monotonic()
    assert job.wait(30) == 130
    yield Resumed(saved, job.trained_steps()[before:], time.monotonic() - asked)
    clear(job.folder)


def test_resume_goes_on_behind_the_checkpoint_with_the_rows_of_the_failed_run(failed, resumed):
    assert resumed.steps == list(range(resumed.saved + 1, resumed.saved + 1 + len(resumed.steps)))
    log = failed[0].folder.joinpath("logs", "replay.log").read_text()
    assert re.findall(r"(\d+) groups lost rows", log) == ["0"]


def test_a_second_ctrl_c_ends_at_once(resumed):
    assert resumed.ended_s < 5


def test_ctrl_c_saves_and_ends_in_order_within_20_s_with_books_that_close(launch):
    job = launch(*LONG)
    job.until(lambda: len(job.trained_steps()) >= 2)
    os.kill(job.process.pid, signal.SIGINT)
    asked = time.monotonic()
    assert job.wait(60) == 130, job.output
    assert time.monotonic() - asked < 20
    assert job.summary()["status"] == "stopped"
    assert list((job.folder / "checkpoints").glob("global_step_*"))
    assert shared_memory_of(job.folder) == []
    books = audit(job.folder)
    assert books.closes, books.differences
    assert books.groups.in_flight == 0 and books.groups.trained >= 2 * 16

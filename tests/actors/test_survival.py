"""Nothing is lost when a process dies: actors that hold state are killed while a run trains, and a whole run is killed and resumed."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from streamrl.cli.audit import audit
from streamrl.cli.audit_report import AuditReport
from tests.actors.jobs import ROWS, Job, shared_memory_of

pytestmark = pytest.mark.ray
RUN = (*ROWS, "cluster.max_restarts=10")
VICTIMS = ("rollout-0", "replay", "store", "prompt", "trainer", "learner-0")


@pytest.fixture
def launch(tmp_path):
    jobs: list[Job] = []

    def start(*arguments: str, **options) -> Job:
        folder = [] if "--resume" in arguments else [f"--run-dir={tmp_path / 'run'}"]
        jobs.append(Job(tmp_path / "run", *folder, *arguments, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


def closed(folder: Path) -> AuditReport:
    report = audit(folder)
    assert report.closes, report.differences
    assert report.lag_max <= report.max_staleness
    return report


def steps_after(job: Job, more: int) -> None:
    """Wait until so many further steps were trained."""
    goal = len(job.trained_steps()) + more
    job.until(lambda: len(job.trained_steps()) >= goal, limit_s=120)


def pids_of(job: Job) -> list[int]:
    table = job.until(lambda: json.loads((job.folder / "waits.json").read_text())["actors"])
    return [health["pid"] for health in table.values() if health]


def kill_everything(job: Job) -> None:
    """The driver, its own Ray and all actors, at one moment."""
    family = [*psutil.Process(job.process.pid).children(recursive=True), *(psutil.Process(pid) for pid in pids_of(job) if psutil.pid_exists(pid))]
    os.kill(job.process.pid, signal.SIGKILL)
    for process in set(family):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(set(family), timeout=10)
    job.process.wait()


def test_every_kind_of_actor_can_die_and_the_run_trains_each_group_once(launch):
    job = launch(*RUN, "trainer.total_training_steps=30", "trainer.save_freq=5")
    steps_after(job, 2)
    for victim in VICTIMS:
        old = job.until(lambda victim=victim: job.health(victim)["pid"])  # the driver may not have asked it yet
        os.kill(old, signal.SIGKILL)
        job.until(lambda old=old, victim=victim: job.health(victim)["pid"] != old, limit_s=60)
        steps_after(job, 1)
        closed(job.folder)
        if victim == "rollout-0":  # nothing of the trainer was lost: no step is missing or there twice
            assert job.trained_steps() == list(range(1, len(job.trained_steps()) + 1))
    assert job.wait() == 0, job.output
    report, summary = closed(job.folder), job.summary()
    assert summary["status"] == "completed" and summary["steps"] == 30
    late = report.dropped["stale"].groups if "stale" in report.dropped else 0  # may leave a batch short
    assert 30 * 16 - late <= report.groups.trained == summary["groups_trained"] <= 30 * 16
    assert set(range(1, 31)) <= set(job.trained_steps())
    for victim in VICTIMS:
        assert f"{victim} died" in job.output
    assert shared_memory_of(job.folder) == []


def saved_step(folder: Path) -> int:
    """The newest checkpoint's, 0 for none."""
    return max((int(path.name.rsplit("_", 1)[1]) for path in (folder / "checkpoints").glob("global_step_*")), default=0)


def rows_left_by_a_kill(job: Job) -> AuditReport:
    """End every process of the run: the books of what it had done close, and its rows stay."""
    kill_everything(job)
    assert any("weights" not in name for name in shared_memory_of(job.folder))
    return closed(job.folder)


def test_a_run_whose_processes_were_all_killed_before_its_first_checkpoint_and_after_goes_on_with_its_rows(launch):
    job = launch(*RUN, "trainer.total_training_steps=400", "trainer.save_freq=8")
    steps_after(job, 3)
    first = rows_left_by_a_kill(job)
    assert saved_step(job.folder) == 0

    job = launch("--resume", str(job.folder), config=None)
    steps_after(job, 1)
    assert "no checkpoint: going on with the starting weights from step 0" in job.said()
    job.until(lambda: saved_step(job.folder) > 0)
    steps_after(job, 2)
    second = rows_left_by_a_kill(job)

    saved = saved_step(job.folder)
    job = launch("--resume", str(job.folder), f"trainer.total_training_steps={saved + 4}", config=None)
    assert job.wait() == 0, job.output
    report, summary = closed(job.folder), job.summary()
    assert summary["status"] == "completed" and summary["steps"] == saved + 4
    late = report.dropped["stale"].groups if "stale" in report.dropped else 0
    assert (saved + 4) * 16 - late <= report.groups.trained <= (saved + 4) * 16
    assert report.trajectories.generated > second.trajectories.generated > first.trajectories.generated
    assert re.findall(r"(\d+) groups lost rows", job.folder.joinpath("logs", "replay.log").read_text()) == ["0", "0"]
    assert shared_memory_of(job.folder) == []

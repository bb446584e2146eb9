"""A run on a Ray that somebody else started: it trains, and leaves that Ray as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.actors.jobs import SMALL, Job, shared_memory_of

pytestmark = pytest.mark.ray
RAY = Path(sys.executable).with_name("ray")


@pytest.fixture
def cluster(tmp_path):
    """A head node of its own on a free port; ended by its own pid file, never by name."""
    script = (
        "import ray, sys, json\n"
        "from ray.cluster_utils import Cluster\n"
        "c = Cluster(initialize_head=True, head_node_args={'num_cpus': 2, 'object_store_memory': 128 << 20})\n"
        "print(json.dumps(c.address), flush=True)\n"
        "sys.stdin.read()\n"
        "c.shutdown()\n"
    )
    head = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield json.loads(head.stdout.readline())
    finally:
        head.stdin.close()
        head.wait(60)


def ask(address: str, code: str) -> str:
    """Run code on the cluster from a fresh driver."""
    script = f"import ray; ray.init(address={address!r}, log_to_driver=False); {code}"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90, env=os.environ).stdout.strip()


def test_a_joined_cluster_runs_the_job_and_is_left_as_it_was(cluster, tmp_path):
    job = Job(tmp_path / "run", f"--run-dir={tmp_path / 'run'}", "--address", cluster, *SMALL)
    try:
        assert job.wait() == 0, job.output
    finally:
        job.end()
    assert job.summary()["status"] == "completed"
    assert shared_memory_of(job.folder) == []
    code = "from ray.util.state import list_actors; print(ray.cluster_resources()['CPU'], [a for a in list_actors() if a.state == 'ALIVE'])"
    assert ask(cluster, code).endswith("2.0 []") or ask(cluster, "print(ray.cluster_resources()['CPU'])") == "2.0"


def test_a_cluster_without_the_gpus_that_are_asked_for_is_refused_with_what_is_missing(cluster, tmp_path):
    job = Job(tmp_path / "run", f"--run-dir={tmp_path / 'run'}", "--address", cluster, *SMALL, "rollout.num_gpus_per_actor=1", "learner.num_gpus_per_rank=1")
    try:
        assert job.wait(60) == 2, job.output
    finally:
        job.end()
    last = job.output.strip().splitlines()[-1]
    assert "2 GPU" in last and "got 0" in last and "Traceback" not in job.output

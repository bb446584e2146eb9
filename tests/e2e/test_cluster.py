"""Runs with ``max_staleness = 0`` on a Ray that somebody else started, rollout actors on one node and two learner ranks on another, against the
one-process reference: same seed, same groups, losses and weights. That Ray is left as it was. One rank in one process is compared in
``tests/pipeline/test_sync_equals_reference.py``.

Ray's test cluster: two nodes of Ray on this machine. They share its memory, but no row and no weight is taken from there: sockets, segments and
snapshots belong to a node of Ray, not to a machine.

Tolerances: the tokens are equal exactly (a scripted engine answers from the request seed), so rewards and group counts are too. Loss and
gradient norm differ by the order of float32 sums over micro-batches and ranks. A weight moves by about lr = 1e-4 an optimizer step whatever
the size of its gradient, so rounding of a gradient near zero may show as a fraction of that.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamrl.cli.main import main
from streamrl.telemetry.samples import read_sample, sample_paths
from tests.actors.jobs import SMALL, Job, shared_memory_of
from tests.e2e.compare import largest_gap, reference_run, saved_weights
from tests.pipeline.tiny import tiny_config

pytestmark = pytest.mark.ray
STEPS = 5
LOSS_TOLERANCE = 2e-5
WEIGHT_TOLERANCE = 5e-5
SYNC = (
    "rollout.engine=scripted",
    "weights.probe=false",
    "replay.max_staleness=0",
    "rollout.n=4",
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=8",
    "learner.num_threads=1",
    f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=false",
    "data.val_max_samples=16",
    "telemetry.sample_groups=8",
    "run.seed=11",
)
RANKS = {"rollout": 1, "learner": 2}  # of the run that has actors of this kind on the far node
CLUSTER = """
import json, sys
from ray.cluster_utils import Cluster
small = {'num_cpus': 1, 'object_store_memory': 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args=small)
cluster.add_node(resources={'far': 4}, **small)
print(json.dumps(cluster.address), flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of the first node; the second one offers ``far``. It ends with its input."""
    process = subprocess.Popen([sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(60)


def ask(address: str, code: str) -> str:
    """Run code on the cluster from a fresh driver."""
    script = f"import ray; ray.init(address={address!r}, log_to_driver=False); {code}"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90, env=os.environ).stdout.strip()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    config = tiny_config("replay.max_staleness=0", steps=STEPS)
    return reference_run(config, tmp_path_factory.mktemp("reference"), STEPS)


@pytest.fixture(scope="module")
def run_apart(cluster, tmp_path_factory) -> Callable[[str], Job]:
    """A finished run whose rollout actors, or whose learner, are on the far node."""
    return functools.cache(lambda kind: launched(cluster, tmp_path_factory.mktemp(kind) / "run", kind))


def launched(cluster: str, folder: Path, kind: str) -> Job:
    job = Job(folder, f"--run-dir={folder}", "--address", cluster, *SYNC, f"cluster.{kind}_resource=far", f"learner.ranks={RANKS[kind]}")
    try:
        nodes = job.until(lambda: {path.parent.name: 0 for path in (folder / "sockets").glob("*/*.sock")} if job.steps() else None)
        assert job.wait() == 0, job.output
    finally:
        job.end()
    assert len(nodes) == 2, "both nodes have actors"
    return job


@pytest.mark.parametrize("kind", RANKS)
def test_a_run_over_two_nodes_equals_the_reference_on_one_rank_and_on_two_and_leaves_nothing_in_memory(run_apart, reference, kind):
    job = run_apart(kind)
    check_steps(job, reference)
    check_advantages(job, reference)
    weights = saved_weights(job.folder / "checkpoints" / f"global_step_{STEPS}", reference.weights)
    assert largest_gap(weights, reference.weights) < WEIGHT_TOLERANCE
    assert main(["audit", str(job.folder)]) == 0
    assert shared_memory_of(job.folder) == []


def test_a_joined_cluster_runs_the_job_and_is_left_as_it_was(cluster, run_apart):
    assert run_apart("rollout").summary()["status"] == "completed"
    alive = "[actor['Name'] for actor in actors().values() if actor['State'] == 'ALIVE']"
    assert ask(cluster, f"from ray._private.state import actors; print(ray.cluster_resources()['CPU'], {alive})") == "2.0 []"


def test_a_cluster_without_the_gpus_that_are_asked_for_is_refused_with_what_is_missing(cluster, tmp_path):
    job = Job(tmp_path / "run", f"--run-dir={tmp_path / 'run'}", "--address", cluster, *SMALL, "rollout.num_gpus_per_actor=1", "learner.num_gpus_per_rank=1")
    try:
        assert job.wait(60) == 2, job.output
    finally:
        job.end()
    last = job.output.strip().splitlines()[-1]
    assert "2 GPU" in last and "got 0" in last and "Traceback" not in job.output


def check_steps(job: Job, reference) -> None:
    steps = [record for record in job.steps() if "reward" in record]
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    for record, expected in zip(steps, reference.steps, strict=True):
        assert record.get("lag_max", 0) == 0
        assert record["response_tokens"] == sum(len(ids) for ids in expected.responses)
        assert record["metrics"]["actor/pg_loss"] == pytest.approx(expected.loss, abs=LOSS_TOLERANCE)
        assert record["metrics"]["actor/grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-3)


def check_advantages(job: Job, reference) -> None:
    """Every group of every step, by what the update was about to read."""
    for path, expected in zip(sample_paths(job.folder / "samples").values(), reference.steps, strict=True):
        sample = read_sample(path)
        place = {f"{uid}_{number % 4}_0": number for number, uid in enumerate(expected.uids)}
        assert set(sample.keys) == set(place)
        for row, key in enumerate(sample.keys):
            got, want = sample.columns["advantages"][row], expected.advantages[place[key]]
            assert sample.columns["responses"][row].tolist() == expected.responses[place[key]]
            assert got.tolist() == pytest.approx(want[: len(got)].tolist(), abs=1e-6)

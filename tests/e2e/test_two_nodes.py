"""Rollout actors on one node, learner on another: the same groups, losses and weights as the synchronous reference in one process.

Ray's test cluster: two nodes of Ray on this machine. They share its memory, but no row and no weight is taken from there: sockets, segments and
snapshots belong to a node of Ray, not to a machine. Tolerances as in ``test_sync_launch.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from streamrl.cli.main import main
from streamrl.telemetry.samples import read_sample, sample_paths
from tests.actors.jobs import Job, shared_memory_of
from tests.e2e.compare import largest_gap, reference_run, saved_weights
from tests.e2e.test_sync_launch import LOSS_TOLERANCE, SYNC, WEIGHT_TOLERANCE
from tests.pipeline.tiny import tiny_config

pytestmark = pytest.mark.ray
STEPS = 3
CLUSTER = """
import json, sys
from ray.cluster_utils import Cluster
small = {'num_cpus': 1, 'object_store_memory': 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args=small)
node = cluster.add_node(resources={'far': 4}, **small)
print(json.dumps(cluster.address), flush=True)
for line in sys.stdin:
    cluster.remove_node(node, allow_graceful=False)
    print('removed', flush=True)
cluster.shutdown()
"""


@contextmanager
def two_nodes() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of the first node; the second one offers ``far``, and goes at a line of input."""
    process = subprocess.Popen([sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield json.loads(process.stdout.readline()), process
    finally:
        process.stdin.close()
        process.wait(60)


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as (address, _):
        yield address


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    config = tiny_config("replay.max_staleness=0", steps=STEPS)
    return reference_run(config, tmp_path_factory.mktemp("reference"), STEPS)


@pytest.mark.parametrize("kind", ["rollout", "learner"])
def test_a_run_over_two_nodes_equals_the_reference_and_leaves_nothing_in_memory(cluster, reference, tmp_path, kind):
    folder = tmp_path / "run"
    sizes = (f"trainer.total_training_steps={STEPS}", f"cluster.{kind}_resource=far", "telemetry.sample_groups=8")
    job = Job(folder, f"--run-dir={folder}", "--address", cluster, *SYNC, *sizes)
    try:
        nodes = job.until(lambda: {path.parent.name: 0 for path in (folder / "sockets").glob("*/*.sock")} if job.steps() else None)
        assert job.wait() == 0, job.output
    finally:
        job.end()
    assert len(nodes) == 2, "both nodes have actors"
    check_steps(job, reference)
    check_advantages(job, reference)
    weights = saved_weights(folder / "checkpoints" / f"global_step_{STEPS}", reference.weights)
    assert largest_gap(weights, reference.weights) < WEIGHT_TOLERANCE
    assert main(["audit", str(folder)]) == 0
    assert shared_memory_of(folder) == []


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

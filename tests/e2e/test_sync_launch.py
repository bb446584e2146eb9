"""A launched run with ``max_staleness = 0`` against the one-process reference: same seed, same groups, losses and weights. One rank is compared
in ``tests/pipeline/test_sync_equals_reference.py``.

Tolerances: the tokens are equal exactly (a scripted engine answers from the request seed), so rewards and group counts are too. Loss and
gradient norm differ by the order of float32 sums over micro-batches and ranks. A weight moves by about lr = 1e-4 an optimizer step whatever
the size of its gradient, so rounding of a gradient near zero may show as a fraction of that.
"""

from __future__ import annotations

import pytest

from tests.actors.jobs import Job
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
    f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=false",
    "data.val_max_samples=16",
    "run.seed=11",
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    config = tiny_config("replay.max_staleness=0", steps=STEPS)
    return reference_run(config, tmp_path_factory.mktemp("reference"), STEPS)


def test_a_launched_run_on_two_ranks_with_bound_zero_equals_the_reference(reference, tmp_path):
    job = Job(tmp_path / "run", f"--run-dir={tmp_path / 'run'}", *SYNC, "learner.ranks=2")
    try:
        assert job.wait() == 0, job.output
    finally:
        job.end()
    steps = [record for record in job.steps() if "reward" in record]
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    for record, expected in zip(steps, reference.steps, strict=True):
        assert record.get("lag_max", 0) == 0
        assert record["response_tokens"] == sum(len(ids) for ids in expected.responses)
        assert record["metrics"]["actor/pg_loss"] == pytest.approx(expected.loss, abs=LOSS_TOLERANCE)
        assert record["metrics"]["actor/grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-3)
    weights = saved_weights(job.folder / "checkpoints" / f"global_step_{STEPS}", reference.weights)
    assert largest_gap(weights, reference.weights) < WEIGHT_TOLERANCE

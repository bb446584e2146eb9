"""configs/tiny_ppo_cpu.yaml in small: the whole pipeline with a critic, a step of which it trains alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

from streamrl.cli.audit import audit
from streamrl.config.checks import check
from streamrl.config.load import load, resolve
from streamrl.pipeline.local import run_local

ROOT = Path(__file__).parents[2]
SMALL = ("data.train_batch_size=16", "rollout.n=4", "actor.ppo_mini_batch_size=16", "critic.ppo_mini_batch_size=4", "data.val_max_samples=32")
RUN = ("trainer.total_training_steps=4", "trainer.critic_warmup=1", "run.seed=11", "learner.num_threads=1")


def test_the_critic_learns_first_and_the_policy_is_published_from_the_second_step_on(tmp_path):
    config = resolve(load([ROOT / "configs" / "tiny_ppo_cpu.yaml"], [*SMALL, *RUN]))
    assert check(config) == []
    records = []
    totals = asyncio.run(run_local(config, tmp_path, record=records.append))
    steps = [record for record in records if record.trajectories]
    assert [record.version for record in steps] == [0, 1, 2, 3] and all(record.lag_max <= 1 for record in steps)
    assert ["actor/pg_loss" in record.metrics for record in steps] == [False, True, True, True]
    losses = [record.metrics["critic/vf_loss"] for record in steps]
    assert losses[-1] < 0.7 * losses[0]
    assert totals.val_accuracies[-1] > 0.3  # four small steps teach little; none may break the policy
    report = audit(tmp_path)
    assert report.closes and report.groups.trained == 4 * 16, report.differences

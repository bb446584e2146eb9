"""configs/tiny_tools_cpu.yaml cut short: the tiny model learns to use its calculator. A launched run with tools is in ``test_plugin_package.py``."""

from __future__ import annotations

import asyncio

from streamrl.config.checks import check
from streamrl.config.load import load, resolve
from streamrl.pipeline.local import run_local
from tests.actors.jobs import TINY

STEPS = 8


def test_the_tiny_model_learns_to_call_its_calculator(tmp_path):
    short = (f"trainer.total_training_steps={STEPS}", "run.seed=1", "data.val_max_samples=50", "learner.num_threads=1")
    config = resolve(load([TINY.with_name("tiny_tools_cpu.yaml")], short))
    assert check(config) == []
    records = []
    asyncio.run(run_local(config, tmp_path, record=records.append))
    steps = [record.metrics for record in records if record.trajectories]
    calls = [step["reward_extra/correct_call/mean"] for step in steps]
    scores = [step["critic/score/mean"] for step in steps]
    assert len(steps) == STEPS and max(step["num_turns/max"] for step in steps) == 4
    assert sum(calls[-2:]) / 2 > sum(calls[:2]) / 2 + 0.05, calls
    assert sum(scores[-2:]) / 2 > sum(scores[:2]) / 2 + 0.03, scores

"""The tiny model learns to use its calculator: the shipped configuration, cut short."""

import json

import pytest

from tests.actors.jobs import TINY, Job

STEPS = 8


@pytest.mark.ray
def test_the_tiny_model_learns_to_call_its_calculator(tmp_path):
    folder = tmp_path / "run"
    job = Job(
        folder,
        f"--run-dir={folder}",
        f"trainer.total_training_steps={STEPS}",
        "run.seed=1",
        "data.val_max_samples=50",
        config=TINY.with_name("tiny_tools_cpu.yaml"),
    )
    assert job.wait(300) == 0, job.output
    steps = [json.loads(line)["metrics"] for line in (folder / "metrics" / "steps.jsonl").read_text().splitlines() if "reward_extra" in line]
    calls = [step["reward_extra/correct_call/mean"] for step in steps]
    scores = [step["critic/score/mean"] for step in steps]
    assert len(steps) == STEPS and max(step["num_turns/max"] for step in steps) == 4
    assert sum(calls[-2:]) / 2 > sum(calls[:2]) / 2 + 0.05, calls
    assert sum(scores[-2:]) / 2 > sum(scores[:2]) / 2 + 0.03, scores

"""Whole runs in one process whose rewards come from a model: a classifier on the learner, a judge with an engine of its own."""

import asyncio
import json
import math

import pytest

from streamrl.config.checks import check
from streamrl.pipeline.local import LocalPipeline
from tests.learner.reward_world import POLICY, save_classifier
from tests.pipeline.tiny import tiny_config

JUDGE = {
    "model_path": POLICY.path,
    "engine": "transformers",
    "dtype": "float32",
    "prompt": "{answer}+1=",
    "score_pattern": r"(\d+)",
    "prompt_length": 96,
    "response_length": 8,
    "transformers": {"num_blocks": 64},
}


@pytest.fixture
def model_rows(tmp_path):
    """Sums that a model scores."""
    rows = [
        {"prompt": [{"role": "user", "content": f"{a}+{b}="}], "data_source": "sums", "reward_model": {"style": "model"}} for a in range(10, 18) for b in (3, 7)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"data.train_files={path}", "data.val_files=[]"]


def run(config, tmp_path):
    """(totals, records) of a run to its end."""
    check(config)
    records = []

    async def whole():
        pipeline = LocalPipeline(config, tmp_path / "run", record=records.append)
        try:
            return await pipeline.run()
        finally:
            await pipeline.close()

    return asyncio.run(whole()), records


def test_a_run_is_trained_on_the_scores_of_a_reward_model(tmp_path, model_rows):
    path = save_classifier(tmp_path / "classifier")
    reward = f"reward.reward_model={{enable: true, model_path: {path}}}"
    totals, records = run(tiny_config(*model_rows, reward, prompts=4, n=4, steps=2), tmp_path)
    assert totals.steps == 2
    for record in records:
        metrics = record.metrics
        assert metrics["reward_model/answers"] == 16 and metrics["reward_model/score/mean"] == pytest.approx(metrics["critic/score/mean"], abs=1e-5)
        assert metrics["critic/score/max"] > metrics["critic/score/min"] and metrics["actor/grad_norm"] > 0


def test_a_run_is_trained_on_the_scores_of_a_judge(tmp_path, model_rows):
    config = tiny_config(*model_rows, f"reward.judge={json.dumps(JUDGE)}", prompts=4, n=4, steps=2, engine="transformers")
    totals, records = run(config, tmp_path)
    assert totals.steps == 2
    for record in records:
        assert record.metrics["critic/score/max"] > record.metrics["critic/score/min"] and math.isfinite(record.metrics["actor/grad_norm"])

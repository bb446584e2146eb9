"""The shipped tiny model, configured small enough for tests."""

from __future__ import annotations

from pathlib import Path

from streamrl.config import Config
from streamrl.config.load import load, resolve

ROOT = Path(__file__).parents[2]
SCORES = ROOT / "tests" / "pipeline" / "scores.py"


def tiny_config(*overrides: str, prompts: int = 8, n: int = 4, steps: int = 3, engine: str = "scripted") -> Config:
    """configs/tiny_cpu.yaml with ``prompts`` x ``n`` rows a step."""
    base = [
        f"rollout.engine={engine}",
        f"rollout.n={n}",
        f"data.train_batch_size={prompts}",
        f"actor.ppo_mini_batch_size={prompts}",
        f"trainer.total_training_steps={steps}",
        "data.val_max_samples=16",
        "run.seed=11",
        "learner.num_threads=1",  # a few small rows: a second thread would mostly wait for the first
    ]
    if engine == "scripted":
        base.append("weights.probe=false")  # it has no policy whose log-probs could be compared
    return resolve(load([ROOT / "configs" / "tiny_cpu.yaml"], [*base, *overrides]))

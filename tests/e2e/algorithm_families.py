"""Every advantage estimator with every policy loss, trained for a few steps on the tiny model: nothing becomes NaN, and weights move.

    python -m tests.e2e.algorithm_families [--steps 10] [--engine transformers] [--only rloo+gspo]

Runs one after another in one process through ``pipeline/local.py``. The scripted engine answers at random, whatever the weights: it shows that
a family trains, not that it learns; the transformers engine shows both. The exit code is 1 when a family fails.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from streamrl.config.checks import check
from streamrl.config.estimators import ESTIMATORS
from streamrl.config.losses import POLICY_LOSSES
from streamrl.pipeline.local import LocalPipeline
from streamrl.pipeline.records import StepRecord
from tests.pipeline.tiny import SCORES, tiny_config

NO_SCORING_PASS = ("optimal_token_baseline", "tir_optimal_token_baseline")  # cannot run in bypass mode
BYPASS = ("algorithm.rollout_correction.bypass_mode=true",)
LEARNING_RATES = {"scripted": 3e-4, "transformers": 5e-5}  # 16 answers a step are few: more than that and the trained model forgets
COMPONENTS = {"scripted": "[digits, brevity]", "transformers": "[score, acc]"}  # of gdpo
LOSS_OPTIONS = {
    "dro": ("actor.policy_loss.dro_beta=0.5",),
    "clip_cov": ("actor.policy_loss.clip_cov_ratio=0.05", "actor.policy_loss.clip_cov_lb=0.01"),
    "kl_cov": ("actor.policy_loss.kl_cov_ratio=0.05",),
    "bypass_ppo_clip": (*BYPASS, "algorithm.rollout_correction.rollout_is=null"),
    "bypass_reinforce": (*BYPASS, "algorithm.rollout_correction.loss_type=reinforce"),
}
LOSSES = [*(name for name in POLICY_LOSSES if name != "bypass_mode"), "bypass_ppo_clip", "bypass_reinforce"]


@dataclass(frozen=True)
class Outcome:
    """Of one family. ``moved``: the weights differ from the starting model's."""

    estimator: str
    loss: str
    rewards: list[float]
    grad_norms: list[float]
    finite: bool
    moved: bool
    seconds: float

    @property
    def good(self) -> bool:
        return self.finite and self.moved

    def line(self) -> str:
        first, last = self.rewards[0], sum(self.rewards[-2:]) / len(self.rewards[-2:])
        numbers = f"{first:8.4f} {last:8.4f} {self.grad_norms[-1]:10.4f}"
        return f"{self.estimator:<29} {self.loss:<17} {numbers}   {'yes' if self.good else 'NO':<6} {self.seconds:6.1f}"


def families() -> Iterator[tuple[str, str]]:
    """Those that make sense."""
    for estimator in ESTIMATORS:
        for loss in LOSSES:
            if not (loss.startswith("bypass") and estimator in NO_SCORING_PASS):
                yield estimator, loss


def options(estimator: str, loss: str, engine: str) -> tuple[str, ...]:
    """The overrides of one family. Random answers are never right, so the scripted engine's are scored by what they look like."""
    mode = () if loss.startswith("bypass") else (f"actor.policy_loss.loss_mode={loss}",)
    components = (f"algorithm.gdpo_reward_keys={COMPONENTS[engine]}",) if estimator == "gdpo" else ()
    reward = (f"reward.custom_reward_function.path={SCORES}", "reward.custom_reward_function.name=token_share") if engine == "scripted" else ()
    return (f"algorithm.adv_estimator={estimator}", *mode, *components, *LOSS_OPTIONS.get(loss, ()), *reward)


def train(estimator: str, loss: str, *, steps: int, engine: str, folder: Path) -> Outcome:
    """One run of its own folder, removed afterwards."""
    small = ("trainer.val_before_train=false", "data.val_files=[]", "actor.ppo_mini_batch_size=2", "learner.num_threads=1")
    rate = f"actor.optim.lr={LEARNING_RATES[engine]}"
    config = tiny_config(*small, rate, *options(estimator, loss, engine), prompts=4, n=4, steps=steps, engine=engine)
    check(config)
    started = time.monotonic()
    records, moved, finite = asyncio.run(_run(config, folder / f"{estimator}-{loss}"))
    seconds = time.monotonic() - started
    numbers = [value for record in records for value in record.metrics.values()]
    return Outcome(
        estimator,
        loss,
        [record.reward for record in records if record.reward is not None],
        [record.metrics.get("actor/grad_norm", math.nan) for record in records],
        finite and all(map(math.isfinite, numbers)) and len(records) == steps,
        moved,
        seconds,
    )


async def _run(config, folder: Path) -> tuple[list[StepRecord], bool, bool]:
    records: list[StepRecord] = []
    pipeline = LocalPipeline(config, folder, record=records.append)
    try:
        await pipeline.run()
        weights = dict(pipeline.learner_rank.engine.full_tensors(torch.float32))
        finite = all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())
        return [record for record in records if record.trajectories], _differ(weights, config.model.path), finite
    finally:
        await pipeline.close()
        shutil.rmtree(folder, ignore_errors=True)


def _differ(weights: dict[str, torch.Tensor], model: str) -> bool:
    from safetensors.torch import load_file

    start = load_file(Path(model) / "model.safetensors")
    return any(not torch.equal(start[name].float(), tensor) for name, tensor in weights.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--engine", choices=("scripted", "transformers"), default="scripted")
    parser.add_argument("--only", metavar="ESTIMATOR+LOSS", help="one family; either side may be empty for all")
    arguments = parser.parse_args()
    estimator, _, loss = (arguments.only or "").partition("+")
    chosen = [(e, policy) for e, policy in families() if estimator in ("", e) and loss in ("", policy)]
    print(f"{'estimator':<29} {'loss':<17} {'first':>8} {'last':>8} {'grad norm':>10}   {'finite':<6} {'s':>6}")
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for family in chosen:
            outcome = train(*family, steps=arguments.steps, engine=arguments.engine, folder=Path(folder))
            print(outcome.line(), flush=True)
            bad += not outcome.good
    print(f"{len(chosen)} families of {arguments.steps} steps, {bad} of them not finite or without effect")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

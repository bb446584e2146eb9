"""A run that stops or crashes and goes on from its checkpoint is the run that never stopped: same batches, losses and rates, and bit-equal weights.

``max_staleness = 0`` and the scripted engine, whose tokens are a function of the request seed; one rank on the CPU. Two ranks, and a change of their
number, are compared in ``tests/learner/test_resume_ranks.py``.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from streamrl.learner import checkpoint_folder
from streamrl.learner.checkpoint import saved_tensors
from streamrl.pipeline.local import LocalPipeline
from streamrl.pipeline.loops import cancel_all
from tests.pipeline.tiny import SCORES, tiny_config

STEPS = 7
FAMILIES = {
    "grpo, KL in the reward": (
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=100",
        "actor.ppo_mini_batch_size=4",
        "actor.ppo_epochs=2",
        "actor.shuffle=true",
        "actor.optim.lr_scheduler_type=cosine",
        "actor.optim.lr_warmup_steps=3",
    ),
    "gae, critic": ("algorithm.adv_estimator=gae", "trainer.critic_warmup=2"),
}
STOPS = {"grpo, KL in the reward": sorted(random.Random(8).sample(range(1, STEPS), 5)), "gae, critic": [1, 4]}
REWARD = (f"reward.custom_reward_function.path={SCORES}", "reward.custom_reward_function.name=token_share")  # random answers are never right


class Life(NamedTuple):
    """What one process's part of a run did."""

    steps: list[tuple]  # (step, keys of the batch in order, metrics)
    state: dict[str, torch.Tensor]  # weights and moments at its end
    kl_coef: float | None


async def live(config, folder: Path, *, until: int = STEPS, crash: bool = False, resume: Path | None = None) -> Life:
    """Train to the end, or until this step is done: stopped in order, or ended at once."""
    steps, ended = [], asyncio.Event()

    def record(record):
        if record.reward is not None:
            told = {name: value for name, value in record.metrics.items() if not name.startswith(("perf/", "timing"))}
            steps.append((record.step, record.reward, record.lags, told))
            if record.step == until < STEPS:
                ended.set() if crash else trainer.stop()

    pipeline = LocalPipeline(config, folder, record=record, resume=resume)
    try:
        trainer = await pipeline._start()
        running = asyncio.create_task(pipeline._run_loops(trainer))
        crashed = asyncio.create_task(ended.wait())
        await asyncio.wait({running, crashed}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        await cancel_all([running, crashed])
        models = pipeline.learner_rank.updates
        state = {f"{name}.{key}": tensor.full_tensor().clone() for name, update in models.items() for key, tensor in whole(update).items()}
        return Life(steps, state, models["actor"].progress.kl_coef)
    finally:
        await pipeline.close()


def whole(update):
    return {name: tensor for name, tensor in saved_tensors(update.model, ("model", "optimizer")).items() if hasattr(tensor, "full_tensor")}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_in_pieces_equals_the_straight_one(tmp_path, family):
    """Stopped after every second of the stop points, crashed after the others: what was trained after the newest checkpoint is trained again."""
    base = ("replay.max_staleness=0", "trainer.val_before_train=false", "trainer.save_freq=1", "data.val_max_samples=2", "learner.num_threads=1")
    config = tiny_config(*base, *REWARD, *FAMILIES[family], prompts=8, n=2, steps=STEPS)
    straight = asyncio.run(live(config, tmp_path / "straight"))
    seen: dict[int, tuple] = {}
    resume = None
    for number, stop in enumerate([*STOPS[family], STEPS]):
        folder = tmp_path / f"life-{number}"
        last = asyncio.run(live(config, folder, until=stop, crash=number % 2 == 1 and stop < STEPS, resume=resume))
        for step in last.steps:
            assert seen.setdefault(step[0], step) == step, "a step that is trained again is the same step"
        resume = checkpoint_folder.latest(folder / "checkpoints") or resume
    assert [seen[step] for step in sorted(seen)] == straight.steps and len(seen) == STEPS
    assert last.kl_coef == straight.kl_coef
    assert set(last.state) == set(straight.state) and all(torch.equal(last.state[name], tensor) for name, tensor in straight.state.items())

"""``max_staleness = 0`` is the synchronous trainer: the streaming pipeline gives the reference's groups, advantages, losses and weights.

The scripted engine answers as a pure function of the request seed, so the tokens are equal exactly; what may differ is the order of
float32 sums (micro-batches, FSDP, padding), which is the tolerance.
"""

from __future__ import annotations

import asyncio

import pytest
import torch

from streamrl.config.checks import check
from streamrl.pipeline import build
from streamrl.pipeline.local import LocalPipeline
from streamrl.pipeline.records import StepRecord
from streamrl.pipeline.reference import SyncReference
from tests.pipeline.tiny import SCORES, tiny_config

LOSS_TOLERANCE = 2e-5  # absolute; losses are of order 1e-2 .. 1
ADAPTIVE = ("algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100", "algorithm.kl_ctrl.kl_coef=0.05")
REWARD = (f"reward.custom_reward_function.path={SCORES}", "reward.custom_reward_function.name=token_share")  # random answers are never right
WEIGHT_TOLERANCE = 2e-5  # absolute, after a few AdamW steps of lr 3e-4: a sign flip of one tiny gradient moves a weight by 3e-4


async def run_reference(config, folder, steps):
    engine = build.build_engine(config, "reference")
    await engine.start()
    try:
        reference = SyncReference(config, engine, folder)
        return await reference.run(steps), {k: v.clone() for k, v in reference.model.state_dict().items()}
    finally:
        await engine.stop()


async def run_streaming(config, folder):
    records: list[StepRecord] = []
    advantages: list[dict[str, torch.Tensor]] = []
    pipeline = LocalPipeline(config, folder, record=records.append)
    judge = pipeline.learner_rank.advantages

    def judged(meta):
        report = judge(meta)
        rows = pipeline.store.kv_batch_get(meta.keys, "train", select_fields=["advantages"])
        advantages.append(dict(zip(meta.keys, rows["advantages"].unbind(), strict=True)))
        return report

    pipeline._threaded.advantages = pipeline._threaded._in_thread("advantages", judged)
    try:
        await pipeline.run()
        return records, advantages, dict(pipeline.learner_rank.engine.full_tensors(torch.float32))
    finally:
        await pipeline.close()


FAMILIES = {
    "grpo, vanilla": (),
    "rloo, gspo, KL in the reward": ("algorithm.adv_estimator=rloo", "actor.policy_loss.loss_mode=gspo", "algorithm.use_kl_in_reward=true", *ADAPTIVE),
    "dr.grpo, cispo, KL loss": (
        "algorithm.norm_adv_by_std_in_grpo=false",
        "actor.loss_agg_mode=seq-mean-token-sum-norm",
        "actor.policy_loss.loss_mode=cispo",
        "actor.use_kl_loss=true",
        "actor.kl_loss_coef=0.1",
        "actor.entropy_coeff=0.01",
    ),
    "reinforce++ baseline, kl_cov, rejection": (
        "algorithm.adv_estimator=reinforce_plus_plus_baseline",
        "actor.policy_loss.loss_mode=kl_cov",
        "actor.policy_loss.kl_cov_ratio=0.1",
        "algorithm.rollout_correction.rollout_rs=token_k2",
        "algorithm.rollout_correction.rollout_rs_threshold=8.0",
        "actor.ppo_max_token_len_per_gpu=128",
    ),
    "gae with a critic, one step of warm-up": (
        "algorithm.adv_estimator=gae",
        "algorithm.lam=0.95",
        "critic.ppo_mini_batch_size=4",
        "critic.shuffle=false",
        "critic.optim.lr=1e-3",
        "trainer.critic_warmup=1",
    ),
    "remax, bypass": (
        "algorithm.adv_estimator=remax",
        "algorithm.rollout_correction.bypass_mode=true",
        "algorithm.rollout_correction.rollout_is=null",
        "algorithm.rollout_correction.rollout_rs=seq_mean_k2",
        "algorithm.rollout_correction.rollout_rs_threshold=40.0",
        "actor.ppo_max_token_len_per_gpu=128",
    ),
    "adapters, KL to the base": ("model.lora_rank=4", "actor.use_kl_loss=true", "actor.kl_loss_coef=0.1"),
}


@pytest.mark.parametrize(("family", "mini", "steps"), [*((family, 8, 2) for family in FAMILIES), ("grpo, vanilla", 4, 5)])
def test_bound_zero_gives_the_same_groups_advantages_loss_and_weights_as_the_reference(tmp_path, family, mini, steps):
    options = (*FAMILIES[family], f"actor.ppo_mini_batch_size={mini}", *REWARD)
    config = tiny_config("replay.max_staleness=0", "trainer.val_before_train=false", *options, steps=steps)
    assert not check(config)
    expectations, weights = asyncio.run(run_reference(config, tmp_path / "reference", steps))
    records, advantages, state = asyncio.run(run_streaming(config, tmp_path / "stream"))
    records = [r for r in records if r.reward is not None]

    assert len(records) == len(expectations) == steps
    for step, expected, got in zip(records, expectations, advantages, strict=True):
        n = config.rollout.n
        keys = [f"{uid}_{i % n}_0" for i, uid in enumerate(expected.uids)]
        assert list(got) == keys
        for i, key in enumerate(keys):
            assert torch.allclose(got[key], expected.advantages[i, : len(expected.responses[i])], atol=1e-5, rtol=1e-4)
        assert step.lag_max == 0
        if mini == 8:
            assert step.metrics.get("actor/pg_loss", 0.0) == pytest.approx(expected.loss, abs=LOSS_TOLERANCE)
            assert step.metrics.get("actor/grad_norm", 0.0) == pytest.approx(expected.grad_norm, rel=1e-3)
            assert step.metrics.get("actor/ratio_max", 1.0) == pytest.approx(1.0, abs=1e-5) or "bypass" in family
        assert step.metrics.get("critic/vf_loss") == (None if expected.value_loss is None else pytest.approx(expected.value_loss, abs=LOSS_TOLERANCE))
    for name in set(weights) & set(state):
        assert torch.allclose(state[name], weights[name], atol=WEIGHT_TOLERANCE), name
    assert set(state) <= set(weights) and len(state) > 10

"""A KL to a reference, through a rank, against its formula written out in plain torch: in the reward and in the loss."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from streamrl.config.training import ActorConfig, AlgorithmConfig, KLControl, OptimConfig, RefConfig, RolloutCorrection
from tests.learner.fakes import DictStore, make_rank, make_rows, save_tiny_llama
from tests.learner.two_ranks import one_step

BETA = 0.3


def formula(kind: str, d: torch.Tensor) -> torch.Tensor:
    """d = pi - ref, in nats."""
    if kind in ("kl", "k1"):
        return d
    if kind == "abs":
        return d.abs()
    if kind in ("mse", "k2"):
        return 0.5 * d**2
    return ((-d).clamp(-20, 20).exp() + d - 1).clamp(-10, 10)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [save_tiny_llama(folder / str(seed), hidden=32, layers=1, seed=seed) for seed in (0, 5)]


def log_probs(model, row):
    size = len(row["response_mask"])
    logits = model(input_ids=row["input_ids"][None]).logits[0, -size - 1 : -1]
    return logits.log_softmax(-1).gather(-1, row["input_ids"][-size:, None])[:, 0]


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl"])
def test_in_the_reward_each_token_pays_beta_times_its_divergence(models, tmp_path, kind):
    policy, reference = (AutoModelForCausalLM.from_pretrained(path) for path in models)
    store = DictStore()
    meta = make_rows(store, 3, 3, seed=2, observations=True)
    algorithm = AlgorithmConfig(use_kl_in_reward=True, kl_penalty=kind, kl_ctrl=KLControl(type="adaptive", kl_coef=BETA, target_kl=0.5, horizon=100))
    rank = make_rank(models[0], store, tmp_path, algorithm=algorithm, ref=RefConfig(path=models[1]))
    judged, _ = one_step(rank, 1, store, meta, ActorConfig(optim=OptimConfig(lr=1e-3)))
    means = []
    for row in (store.rows[key] for key in meta.keys):
        with torch.no_grad():
            penalty = formula(kind, log_probs(policy, row) - log_probs(reference, row))
        mask = row["response_mask"]
        torch.testing.assert_close(row["token_level_rewards"], row["rm_scores"] - BETA * penalty * mask, atol=2e-5, rtol=1e-4)
        means.append(float((penalty * mask).sum() / mask.sum()))
    divergence = sum(means) / len(means)
    assert judged.metrics["actor/reward_kl_penalty"] == pytest.approx(divergence, rel=1e-4)
    error = max(-0.2, min(0.2, divergence / 0.5 - 1))
    assert rank._controller.beta == pytest.approx(BETA * (1 + error * len(meta) / 100), rel=1e-6)
    rank.stop()


@pytest.mark.parametrize("kind", ["mse", "low_var_kl", "abs", "k1+"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
def test_in_the_loss_it_adds_its_mean_and_its_gradient(models, tmp_path, kind, mode):
    policy, reference = (AutoModelForCausalLM.from_pretrained(path) for path in models)
    store = DictStore()
    meta = make_rows(store, 2, 3, seed=3, observations=True)
    actor = ActorConfig(optim=OptimConfig(lr=1e-3), use_kl_loss=True, kl_loss_coef=BETA, kl_loss_type=kind, loss_agg_mode=mode, ppo_micro_batch_size_per_gpu=2)
    algorithm = AlgorithmConfig(rollout_correction=RolloutCorrection(rollout_is=None))
    rank = make_rank(models[0], store, tmp_path, actor=actor, algorithm=algorithm, ref=RefConfig(path=models[1]))
    _, report = one_step(rank, 1, store, meta, actor)
    rows = [store.rows[key] for key in meta.keys]
    size = len(rows) if mode == "seq-mean-token-sum" else sum(int(row["loss_mask"].sum()) for row in rows)
    loss, value = torch.zeros(()), 0.0
    for row in rows:
        pi = log_probs(policy, row)
        d, mask = pi - log_probs(reference, row).detach(), row["loss_mask"]
        taught = formula("k2" if kind == "k1+" else kind, d)  # "+": the value of k1 with the gradient of k2
        value += float((formula("k1" if kind == "k1+" else kind, d.detach()) * mask).sum()) / size
        loss = loss + ((BETA * taught - (pi - pi.detach()).exp() * row["advantages"]) * mask).sum() / size
    loss.backward()
    norm = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in policy.parameters()))
    assert report.metrics["actor/kl_loss"] == pytest.approx(value, rel=1e-4, abs=1e-6)
    assert report.metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-3)
    rank.stop()

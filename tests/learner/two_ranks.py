"""Two learner ranks in processes of their own, over one scenario. What the ranks return is plain data."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from streamrl.config.critic import CriticConfig, CriticOptim
from streamrl.config.training import ActorConfig, AlgorithmConfig, KLControl, OptimConfig, PolicyLossConfig
from streamrl.learner.plan import plan_shares, plan_update
from streamrl.learner.reward_plan import plan_rewards
from streamrl.protocol.learn import UpdateWork
from tests.learner.fakes import DictStore, make_rank, make_rows
from tests.learner.processes import run_two_ranks
from tests.learner.reward_world import RowStore, reward_model, save_classifier, scores_of, unscored_rows

LIMIT_S = 60.0
STEP = {"global_step": 1, "total_steps": 10}
ACTOR = ActorConfig(ppo_mini_batch_size=2, ppo_epochs=2, use_dynamic_bsz=True, ppo_max_token_len_per_gpu=40, optim=OptimConfig(lr=1e-3))
SMALL = {"ppo_mini_batch_size": 2, "use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 40, "optim": OptimConfig(lr=1e-4)}


# Losses that are easy to normalise by the wrong count: sessions of several rows, a choice over the whole mini-batch, a KL beside the loss.
FAMILIES = {
    "gspo, several outputs": (ActorConfig(policy_loss=PolicyLossConfig(loss_mode="gspo"), entropy_coeff=0.01, **SMALL), AlgorithmConfig()),
    "clip_cov, optimal baseline": (
        ActorConfig(policy_loss=PolicyLossConfig(loss_mode="clip_cov", clip_cov_ratio=0.2, clip_cov_lb=0.01, clip_cov_ub=50.0), **SMALL),
        AlgorithmConfig(adv_estimator="optimal_token_baseline"),
    ),
    "dr.grpo, KL twice": (
        ActorConfig(loss_agg_mode="seq-mean-token-sum-norm", use_kl_loss=True, kl_loss_coef=0.5, **SMALL),
        AlgorithmConfig(norm_adv_by_std_in_grpo=False, use_kl_in_reward=True, kl_ctrl=KLControl(type="adaptive", kl_coef=0.1, horizon=50)),
    ),
    "gae, critic": (ActorConfig(**SMALL), AlgorithmConfig(adv_estimator="gae", gamma=0.99, lam=0.9)),
    "grpo, adapters, KL to the base": (ActorConfig(use_kl_loss=True, kl_loss_coef=0.5, **SMALL | {"optim": OptimConfig(lr=1e-2)}), AlgorithmConfig()),
}
CRITICS = {"gae, critic": CriticConfig(ppo_mini_batch_size=1, ppo_epochs=2, loss_agg_mode="seq-mean-token-mean", optim=CriticOptim(lr=1e-3))}
LORA = {"grpo, adapters, KL to the base": {"lora_rank": 4, "target_modules": ("q_proj", "v_proj", "down_proj")}}


def family_steps(rank, ranks: int, store: DictStore, actor: ActorConfig, **order) -> list[dict]:
    """Two steps on the same rows, the second away from the start; the metrics of each."""
    meta = make_rows(store, 4, 3, seed=3, outputs=2)
    if order.get("reversed"):
        meta = meta.select_keys(meta.keys[::-1])
    reports = []
    for _ in range(2):
        judged, report = one_step(rank, ranks, store, meta, actor)
        reports.append(judged.metrics | report.metrics)
    return reports


def weights_of(rank) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in rank.engine.full_tensors(torch.float32)}


def one_step(rank, ranks, store, meta, actor):
    """Score, judge and learn ``meta``. Each process fills a store of its own, so each scores every share and judges its copy."""
    for share in plan_shares(meta, ranks, actor):
        report = rank.log_probs(share)
        if rank.has_reference:
            rank.ref_log_probs(share)
        if "critic" in rank.updates:
            rank.values(share)
    report.metrics |= rank.advantages(meta).metrics
    if "critic" in rank.updates:
        report.metrics |= rank.update_critic(plan_update(meta, ranks, rank.updates["critic"].lesson.batching, **STEP)[rank.rank]).metrics
    return report, rank.update(plan_update(meta, ranks, actor, **STEP)[rank.rank])


def scenario(rank, number: int, folder: Path) -> dict:
    """What the tests ask of two ranks, one after another in one pair of processes: starting a process costs seconds."""
    out: dict = {}
    store = rank._store
    meta = make_rows(store, 4, 3, seed=1)
    shares = plan_shares(meta, 2, ACTOR)
    _, update = one_step(rank, 2, store, meta, ACTOR)
    out["update"] = [update.applied, update.trained_tokens, update.metrics]
    out["share_sizes"] = [len(share) for share in shares]
    torch.save(weights_of(rank), folder / f"after-update-{number}.pt")
    rank.stage()
    rank.save(str(folder / "saved"))
    manifest = rank.snapshot(3)
    out["manifest"] = None if manifest is None else manifest.path
    out["poisoned"] = poisoned_step(rank, number, meta)
    out["uneven"] = uneven_rows(rank, number)
    rank.load(str(folder / "saved"))
    out["position"] = rank.updates["actor"].progress.schedule_position
    return out


def poisoned_step(rank, number, meta) -> list:
    """A NaN in the advantages of one row: it lies on one rank only, yet both skip and nothing moves."""
    before = weights_of(rank)
    key = meta.keys[0]
    good = rank._store.rows[key]["advantages"]
    rank._store.rows[key]["advantages"] = torch.full_like(good, float("nan"))
    work = plan_update(meta, 2, ActorConfig(ppo_mini_batch_size=4), **STEP)[number]
    report = rank.update(work)
    rank._store.rows[key]["advantages"] = good
    same = all(torch.equal(before[name], tensor) for name, tensor in weights_of(rank).items())
    return [report.applied, report.skipped, same]


def uneven_rows(rank, number) -> list:
    """One rank has four long rows, one to a micro-batch, the other four short ones in one: both run four and neither waits for ever."""
    share = make_rows(rank._store, 4, 1, seed=2 + number, prompt=(25, 25) if number == 0 else (5, 5), response=(10, 10) if number == 0 else (5, 5))
    started = time.monotonic()
    scored = rank.log_probs(share)
    for row in (rank._store.rows[key] for key in share.keys):
        row["advantages"] = row["rollout_is_weights"] = torch.ones(len(row["response_mask"]))
    report = rank.update(UpdateWork(share, [share.keys], 1, 10))
    return [report.applied, report.trained_tokens, time.monotonic() - started, scored.metrics["actor/entropy"]]


def reward_scores(comm, number: int, path: str) -> list:
    """What this rank gave its share of the rows, and the report; the second time all rows are the first rank's."""
    store, model = RowStore(), reward_model(path, comm, max_tokens=40)
    meta = store.add(unscored_rows())
    report = model.score(store, plan_rewards(meta, 2)[number])
    found = scores_of(store)
    lonely = model.score(store, meta if number == 0 else meta.select_keys([]))
    return [found, report.metrics, lonely.metrics]


def _main(number: int, address, results, model: str, folder: Path) -> None:
    torch.set_num_threads(1)
    store = DictStore()
    rank = make_rank(model, store, folder, rank=number, ranks=2, actor=ACTOR)
    if number == 0:
        meeting = rank.open_rendezvous("127.0.0.1")
        address.put(meeting)
    else:
        meeting = address.get(timeout=LIMIT_S)
    rank.start(meeting)
    found = scenario(rank, number, folder)
    found["reward model"] = reward_scores(rank.engine.comm, number, str(folder / "classifier"))
    rank.stop()
    for name, (actor, algorithm) in FAMILIES.items():
        store = DictStore()
        rank = make_rank(model, store, folder, rank=number, ranks=2, actor=actor, algorithm=algorithm, lora=LORA.get(name, {}), critic=CRITICS.get(name))
        if number == 0:
            address.put(rank.open_rendezvous("127.0.0.1"))
            rank.start(rank._rendezvous.address)
        else:
            rank.start(address.get(timeout=LIMIT_S))
        found[name] = family_steps(rank, 2, store, actor)
        if rank.engine.adapters is not None:
            found["base"] = rank.engine.adapters.record(torch.float32).base
        rank.stop()
    results.put((number, json.dumps(found)))


def run(model: str, folder: Path) -> list[dict]:
    """The results of rank 0 and rank 1; TimeoutError (queue.Empty) when they are not there within the limit."""
    (folder / "saved").mkdir()
    save_classifier(folder / "classifier")
    return run_two_ranks(_main, LIMIT_S, model, folder)

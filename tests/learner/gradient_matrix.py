"""One mini-batch, its loss and its gradient under every way to compute it, on as many ranks as ``comm`` has.

The optimizer is set up so that nothing but a record remains of a step: the learning rate is 0, so the weights stay, and beta_1 is 0, so the first
moment is the clipped gradient.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from streamrl.config.rollout import ModelConfig
from streamrl.config.training import ActorConfig, AlgorithmConfig, LearnerConfig, OptimConfig, PolicyLossConfig
from streamrl.learner.comm import Comm
from streamrl.learner.engine import PolicyEngine
from streamrl.learner.loading import open_policy
from streamrl.learner.objective import Objective
from streamrl.learner.plan import plan_update
from streamrl.learner.policy_update import PolicyLesson
from streamrl.learner.rows import Rows
from streamrl.learner.update import Update
from streamrl.protocol.meta import KVBatchMeta
from tests.learner.fakes import DictStore, make_rows

LONGEST = 12.0
RECORDING = OptimConfig(lr=0.0, betas=(0.0, 0.999))
COLUMNS = ["loss_mask", "old_log_probs", "advantages", "rollout_is_weights"]

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LOSSES = {
    "vanilla": {"entropy_coeff": 0.01},
    "gspo": {"policy_loss": PolicyLossConfig(loss_mode="gspo")},
    "clip_cov": {"policy_loss": PolicyLossConfig(loss_mode="clip_cov", clip_cov_ratio=0.2, clip_cov_lb=0.01, clip_cov_ub=50.0)},
}
SPLITS: dict[str, dict[str, Any]] = {
    "whole": {},
    "3 rows": {"ppo_micro_batch_size_per_gpu": 3},
    "40 tokens": {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 40},
}


@dataclass(frozen=True)
class Build:
    """How the model is laid out."""

    learner: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = (1, 4)


PADDED = {"use_remove_padding": False}
BUILDS = {
    "plain": Build(ranks=(1, 2, 4)),  # packed rows that share their prompts
    "packed": Build({"shared_prompts": False}, ranks=(1, 2)),
    "padded": Build(model=PADDED, ranks=(1, 2)),
    "checkpointing": Build(model={"enable_gradient_checkpointing": True}),
    "parameter offload": Build({"param_offload": True}),
    "optimizer offload": Build({"optimizer_offload": True}, ranks=(1,)),
    "gathered weights kept": Build({"reshard_after_forward": False}, ranks=(4,)),
    "reduced every micro-batch": Build({"sync_every_micro_batch": True}, ranks=(4,)),
    "copies": Build({"fsdp_size": 1}, ranks=(2,)),
    "copies of shards": Build({"fsdp_size": 2}, ranks=(4,)),
    "all at once": Build({"param_offload": True, "fsdp_size": 2, "sync_every_micro_batch": True}, PADDED | {"enable_gradient_checkpointing": True}, ranks=(4,)),
}


@dataclass
class Found:
    """``gradient``: of all parameters, whole, clipped."""

    loss: float
    norm: float
    gradient: dict[str, torch.Tensor]


Case = tuple[str, str, str, str]  # build, loss, mode, split


def cases(ranks: int) -> Iterator[Case]:
    """Every loss and mode on the plain build, in every split on some number of ranks; on the others fixed micro-batches."""
    splits = {1: tuple(SPLITS), 2: ("whole", "40 tokens"), 4: ("3 rows",)}[ranks]
    yield from (("plain", loss, mode, split) for loss, mode, split in product(LOSSES, MODES, splits))
    for build, how in BUILDS.items():
        if ranks in how.ranks and build != "plain":
            yield build, "vanilla", "seq-mean-token-mean", "3 rows"


def expectations() -> Iterator[Case]:
    """What all others are compared with, on one rank."""
    yield from (("padded", loss, mode, "whole") for loss, mode in product(LOSSES, MODES))


def make_actor(loss: str, mode: str, split: str, **changes: Any) -> ActorConfig:
    return ActorConfig(**{"loss_agg_mode": mode, "ppo_mini_batch_size": 4, "grad_clip": 1e9, "optim": RECORDING} | LOSSES[loss] | SPLITS[split] | changes)


def make_batch() -> tuple[DictStore, KVBatchMeta]:
    """Four groups with 18 rows of unlike length, sessions of several outputs and tokens that the model did not write; away from the start of an update."""
    store, draw = DictStore(), random.Random(11)
    meta = make_rows(store, 4, 3, seed=11, outputs=2, observations=True)
    for row in store.rows.values():
        size = len(row["response_mask"])
        row["old_log_probs"] = -torch.tensor([draw.uniform(0.5, 6.0) for _ in range(size)])
        row["advantages"] = torch.tensor([draw.gauss(0.0, 1.0) for _ in range(size)])
        row["rollout_is_weights"] = torch.tensor([draw.uniform(0.3, 2.0) for _ in range(size)])
    for key in meta.keys:
        store.rows[key]["session_weight"] = torch.tensor(0.5 if int(key.split("_")[1]) % 2 else 1.0)
    return store, meta


class Bench:
    """One rank's engine, and steps on it."""

    def __init__(self, model: str, comm: Comm, build: Build, actor: ActorConfig | None = None) -> None:
        learner = LearnerConfig(**{"ranks": comm.ranks, "dtype": "float32"} | build.learner)
        pretrained = open_policy(ModelConfig(path=model, **build.model))
        self.engine = PolicyEngine(pretrained, actor or make_actor("vanilla", "token-mean", "whole"), learner, comm, 1.0)

    def update(self, actor: ActorConfig) -> Update:
        self.engine._grad_clip = actor.grad_clip
        lesson = PolicyLesson(self.engine, actor, Objective(actor, AlgorithmConfig(), LONGEST), seed=7)
        return Update(self.engine, lesson, max_consecutive_skips=3)

    def step(self, update: Update, actor: ActorConfig, store: DictStore, meta: KVBatchMeta):
        comm = self.engine.comm
        work = plan_update(meta, comm.ranks, actor, global_step=1, total_steps=10)[comm.rank]
        if not len(work.meta):
            return update.run(Rows.none(COLUMNS), work)
        fields = ["input_ids", *COLUMNS, *(["session_weight"] if update.lesson.counts_sessions else [])]
        return update.run(Rows.of(work.meta.keys, store.kv_batch_get(work.meta.keys, "train", fields), COLUMNS), work)

    def gradient(self) -> dict[str, torch.Tensor]:
        """Whole: every rank adds the rows that it keeps, and as many add each as there are copies."""
        comm, parameters = self.engine.comm, self.engine.parameters
        wholes = {name: torch.zeros(parameter.shape, dtype=torch.float64) for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            moment = self.engine.optimizer.state[parameter]["exp_avg"]
            for part in moment.__create_chunk_list__():
                wholes[name][part.offsets[0] : part.offsets[0] + part.sizes[0]] = moment.to_local()
        flat = torch.tensor(comm.sum(torch.cat([whole.flatten() for whole in wholes.values()]))) / self.engine._copies
        return {name: part.reshape(whole.shape) for part, (name, whole) in zip(flat.split([w.numel() for w in wholes.values()]), wholes.items(), strict=True)}

    def found(self, actor: ActorConfig, store: DictStore, meta: KVBatchMeta) -> Found:
        report = self.step(self.update(actor), actor, store, meta)
        assert report.applied == 1
        return Found(report.metrics["actor/pg_loss"], report.metrics["actor/grad_norm"], self.gradient())


def run_cases(model: str, comm: Comm) -> dict[Case, Found]:
    """Rows come in another order for every split but the whole."""
    store, meta = make_batch()
    found: dict[Case, Found] = {}
    benches: dict[str, Bench] = {}
    for case in (*cases(comm.ranks), *(expectations() if comm.ranks == 1 else ())):
        build, loss, mode, split = case
        if build not in benches:
            benches[build] = Bench(model, comm, BUILDS[build])
        found[case] = benches[build].found(make_actor(loss, mode, split), store, meta if split == "whole" else meta.select_keys(meta.keys[::-1]))
    clipped = make_actor("vanilla", "token-mean", "3 rows", grad_clip=0.1)
    return found | {("plain", "vanilla", "token-mean", "clipped"): benches["plain"].found(clipped, store, meta)}

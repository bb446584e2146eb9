"""The reference policy of a KL: the starting model, frozen, sharded over the same ranks and computed in the same dtype as the policy.

It is loaded from ``ref.path`` when the rank starts and is in no checkpoint, so a resumed run compares with the model the run began with. Has no
optimizer and no gradients; its shards are kept in the compute dtype, which gives the same values as casting them anew for each pass. A policy of
adapters has it already: with the adapters off, it is its reference. Only another ``ref.path`` loads a copy there.
"""

from __future__ import annotations

import torch
from msgspec.structs import replace

from streamrl.config.rollout import ModelConfig
from streamrl.config.training import LearnerConfig, RefConfig
from streamrl.learner.comm import Comm
from streamrl.learner.engine import PolicyEngine
from streamrl.learner.forward import Scored, TokenScorer
from streamrl.learner.loading import Pretrained, fill, open_policy
from streamrl.learner.packing import layout_of
from streamrl.learner.rows import MicroBatch
from streamrl.learner.scoring import Scorer
from streamrl.learner.sharding import shard, shard_device


def open_reference(policy: PolicyEngine, model: ModelConfig, ref: RefConfig, learner: LearnerConfig, temperature: float) -> Scorer:
    """What ``ref`` names. A collective."""
    if policy.adapters is not None and ref.path in (None, model.path):
        return BasePolicy(policy)
    if ref.param_offload is not None:
        learner = replace(learner, param_offload=ref.param_offload)
    return ReferencePolicy(open_policy(model, ref.path, "ref.path"), learner, policy.comm, temperature)


class BasePolicy:
    """A policy without its adapters; no second copy of the base."""

    def __init__(self, policy: PolicyEngine) -> None:
        assert policy.adapters is not None
        self.comm, self.layout = policy.comm, policy.layout
        self._policy, self._adapters = policy, policy.adapters

    def score(self, batch: MicroBatch, *, with_entropy: bool = False, with_squares: bool = False) -> Scored:
        """The micro-batch's selected tokens at the rollout's temperature."""
        with self._adapters.off():
            return self._policy.score(batch, with_entropy=with_entropy, with_squares=with_squares)


class ReferencePolicy:
    """Scores rows; every method is a collective."""

    def __init__(self, pretrained: Pretrained, learner: LearnerConfig, comm: Comm, temperature: float) -> None:
        self.comm, self.layout = comm, layout_of(pretrained.model, learner)
        for parameter in pretrained.model.requires_grad_(False).parameters():
            parameter.data = parameter.data.to(getattr(torch, learner.dtype))
        self._scorer = shard(TokenScorer(pretrained.model), learner, comm, keep_root=False)
        fill(self._scorer, pretrained, "policy.", shard_device(learner, comm))
        self._temperature = temperature

    def score(self, batch: MicroBatch, *, with_entropy: bool = False, with_squares: bool = False) -> Scored:
        """The micro-batch's selected tokens at the rollout's temperature."""
        return self._scorer(batch.inputs, self._temperature, with_entropy, with_squares)

"""The reference policy of a KL: the starting model, frozen, sharded over the same ranks and computed in the same dtype as the policy.

It is loaded from ``ref.path`` when the rank starts and is in no checkpoint, so a resumed run compares with the model the run began with. Has no
optimizer and no gradients; its shards are kept in the compute dtype, which gives the same values as casting them anew for each pass.
"""

from __future__ import annotations

import torch
from torch import nn

from streamrl.config.training import LearnerConfig
from streamrl.learner.comm import Comm
from streamrl.learner.engine import shard
from streamrl.learner.forward import Scored, TokenScorer
from streamrl.learner.rows import MicroBatch


class ReferencePolicy:
    """Scores rows; every method is a collective."""

    def __init__(self, model: nn.Module, learner: LearnerConfig, comm: Comm, temperature: float) -> None:
        self.comm = comm
        for parameter in model.requires_grad_(False).parameters():
            parameter.data = parameter.data.to(getattr(torch, learner.dtype))
        self._scorer = shard(TokenScorer(model), learner, comm, keep_root=False)
        self._temperature = temperature

    def score(self, batch: MicroBatch, *, with_entropy: bool = False, with_squares: bool = False) -> Scored:
        """The micro-batch's selected tokens at the rollout's temperature."""
        rows_N, columns_N = batch.positions_N()
        return self._scorer(batch.ids_BL, rows_N, columns_N, self._temperature, with_entropy, with_squares)

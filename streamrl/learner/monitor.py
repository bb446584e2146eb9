"""Diagnostics of an update call over all its tokens, of all mini-batches and ranks: quantiles do not add up, so the tokens are gathered once.

Reads log-ratios and advantages as the loss saw them. Decides nothing and moves no weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algorithms.diagnostics import effective_sample_size, policy_diagnostics
from streamrl.algorithms.losses.tokens import clip_range
from streamrl.config.training import ActorConfig
from streamrl.learner.comm import Comm
from streamrl.learner.rows import MicroBatch


class UpdateMonitor:
    """``add`` every micro-batch, then ``metrics`` once; the latter is a collective."""

    def __init__(self, actor: ActorConfig) -> None:
        self._range = clip_range(actor)
        self._parts: list[Tensor] = []

    def add(self, batch: MicroBatch, log_probs_N: Tensor) -> None:
        """``log_probs_N`` of the batch's selected tokens; the placeholder of a batch without any becomes NaN, which diagnostics skip."""
        mask_N, old_N, advantages_N = (batch.columns[name][batch.selection] for name in ("loss_mask", "old_log_probs", "advantages"))
        log_ratio_N = torch.where(mask_N.bool(), log_probs_N.detach() - old_N, torch.nan)
        self._parts.append(torch.stack([log_ratio_N, advantages_N]).float())

    def metrics(self, comm: Comm) -> dict[str, float]:
        """Ratio quantiles, KL three ways, the share of tokens that each side clips, and how evenly the ratios weigh."""
        local = torch.cat(self._parts, dim=1) if self._parts else torch.zeros(2, 0)
        (log_ratio, advantages), _ = comm.gather(local)
        log_ratio, advantages = log_ratio[None], advantages[None]
        mask, (low, high) = torch.ones_like(log_ratio, dtype=torch.bool), self._range
        found = policy_diagnostics(torch.zeros_like(log_ratio), log_ratio, advantages, mask, low=low, high=high)
        found["ratio_ess"] = effective_sample_size(log_ratio.clamp(-20.0, 20.0).exp(), mask)
        return found

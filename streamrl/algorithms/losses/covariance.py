"""Clip-Cov and KL-Cov: entropy collapses through the few tokens whose log-prob and advantage vary together (Cui et al. 2025, arXiv:2505.22617).

    cov = (A - mean A)(pi - mean pi)      means and selection over all trainable tokens of the mini-batch

    clip_cov   vanilla without dual clip; of the tokens with lb < cov < ub that the clip spares, a random max(1, int(clip_cov_ratio * tokens)) lose
               their loss
    kl_cov     -A rho; the max(1, int(kl_cov_ratio * tokens)) largest cov get + ppo_kl_coef |l|

``select`` of a loss makes the choice from a whole mini-batch (log-probs stored or of a pass without gradient); micro-batches then pass their
rows of it as ``selected``. Without it the given batch is taken for the mini-batch. Nothing here gathers over ranks: whoever selects sees all
rows. Shapes: B rows, T response tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from streamrl.algorithms.losses.tokens import Loss, Tokens, clip_range, policy_loss
from streamrl.algorithms.masks import masked, masked_mean
from streamrl.config.training import ActorConfig


def selection_generator(seed: int, step: int, mini_batch: int) -> torch.Generator:
    """Same run, step and mini-batch, same choice: on every rank, and after a resume."""
    state = np.random.SeedSequence((seed, step, mini_batch)).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state) >> 1)


@torch.no_grad()
def select_to_clip(
    old_log_probs: Tensor, log_probs: Tensor, advantages: Tensor, loss_mask: Tensor, *, config: ActorConfig, generator: torch.Generator | None = None
) -> Tensor:
    """bool [B, T]: the tokens that clip_cov silences. ``generator`` draws them, on the CPU; None: torch's own."""
    low, high = clip_range(config)
    keys = config.policy_loss
    covariance = _covariance(advantages, log_probs, loss_mask)
    ratio = masked(log_probs - old_log_probs, loss_mask).exp()
    spared = torch.where(advantages > 0, ratio <= 1 + high, ratio >= 1 - low)
    candidates = ((covariance > keys.clip_cov_lb) & (covariance < keys.clip_cov_ub) & spared & loss_mask.bool()).flatten().nonzero().flatten()
    order = torch.randperm(len(candidates), generator=generator)[: _share(keys.clip_cov_ratio, loss_mask)]
    return _chosen(candidates[order.to(candidates.device)], loss_mask)


@torch.no_grad()
def select_to_penalise(
    old_log_probs: Tensor, log_probs: Tensor, advantages: Tensor, loss_mask: Tensor, *, config: ActorConfig, generator: torch.Generator | None = None
) -> Tensor:
    """bool [B, T]: the tokens that kl_cov penalises. Nothing is drawn; ``generator`` is taken so that both are called alike."""
    covariance = _covariance(advantages, log_probs, loss_mask).masked_fill(~loss_mask.bool(), -torch.inf)
    return _chosen(covariance.flatten().topk(_share(config.policy_loss.kl_cov_ratio, loss_mask)).indices, loss_mask)


@policy_loss("clip_cov", select_to_clip)
def clip_cov(tokens: Tokens, config: ActorConfig) -> Loss:
    """A selected token has neither loss nor gradient; ``pg_clipfrac`` is their share."""
    low, high = clip_range(config)
    gain, selected = -tokens.advantages, _selected(tokens)
    pessimistic = torch.maximum(gain * tokens.ratio, gain * tokens.ratio.clamp(1 - low, 1 + high))
    return Loss(pessimistic.masked_fill(selected, 0), selected)


@policy_loss("kl_cov", select_to_penalise)
def kl_cov(tokens: Tokens, config: ActorConfig) -> Loss:
    """A = 1, l = 0.5, selected, coefficient 0.1 gives -exp(0.5) + 0.05; ``pg_clipfrac`` is the share of penalised tokens."""
    selected = _selected(tokens)
    penalty = config.policy_loss.ppo_kl_coef * tokens.bounded_log_ratio.abs()
    return Loss(penalty.masked_fill(~selected, 0) - tokens.advantages * tokens.ratio, selected)


def _selected(tokens: Tokens) -> Tensor:
    assert tokens.selected is not None
    return tokens.selected.bool()


def _covariance(advantages: Tensor, log_probs: Tensor, mask: Tensor) -> Tensor:
    return masked((advantages - masked_mean(advantages, mask)) * (log_probs - masked_mean(log_probs, mask)), mask)


def _share(ratio: float, mask: Tensor) -> int:
    """At least one token, at most all."""
    tokens = int(mask.bool().sum())
    return min(max(1, int(ratio * tokens)), tokens)


def _chosen(places: Tensor, mask: Tensor) -> Tensor:
    chosen = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    chosen[places] = True
    return chosen.view(mask.shape)

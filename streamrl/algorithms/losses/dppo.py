"""DPPO: a trust region on the divergence of the token's probability instead of on its ratio (arXiv:2602.04879).

    L = -A sg(min(rho, c)) pi * valid      p = exp(pi), q = exp(old), c = dppo_truncation

    dppo_tv   A > 0: p - q <= hi,  else p - q >= -lo
    dppo_kl   binary KL(q, p) <= hi (A > 0) or <= lo, or p moved in the safe direction: p <= q (A > 0), p >= q (else)

    binary KL(q, p) = q (old - pi) + (1 - q) ln((1 - q) / (1 - p))

An invalid token has neither loss nor gradient. ``c`` has its own key with the value its authors advise, apart from ``clip_ratio_c``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algorithms.losses.tokens import Loss, Tokens, clip_range, policy_loss
from streamrl.algorithms.masks import masked
from streamrl.config.training import ActorConfig

LOG_FLOOR = 1e-8  # keeps ln(1 - p) finite at p = 1


@policy_loss("dppo_tv")
def dppo_tv(tokens: Tokens, config: ActorConfig) -> Loss:
    """p = 0.5, q = 0.2, hi = 0.2, A = 1: the move of 0.3 is too far, no loss; A = -1: it is free."""
    low, high = clip_range(config)
    now, old = _probabilities(tokens)
    moved = now - old
    return _truncated(tokens, torch.where(tokens.advantages > 0, moved <= high, moved >= -low), config)


@policy_loss("dppo_kl")
def dppo_kl(tokens: Tokens, config: ActorConfig) -> Loss:
    """p = 0.5, q = 0.2 have binary KL 0.193: at hi = 0.1 and A = 1 no loss."""
    low, high = clip_range(config)
    now, old = _probabilities(tokens)
    divergence = -old * tokens.log_ratio.detach() + (1 - old) * ((1 - old + LOG_FLOOR) / (1 - now + LOG_FLOOR)).log()
    return _truncated(tokens, torch.where(tokens.advantages > 0, (divergence <= high) | (now <= old), (divergence <= low) | (now >= old)), config)


def _probabilities(tokens: Tokens) -> tuple[Tensor, Tensor]:
    return tokens.log_probs.detach().exp(), masked(tokens.raw_old_log_probs, tokens.mask).exp()


def _truncated(tokens: Tokens, valid: Tensor, config: ActorConfig) -> Loss:
    c, ratio = config.policy_loss.dppo_truncation, tokens.ratio.detach()
    scale = torch.where(valid, -tokens.advantages * ratio.clamp(max=c), torch.zeros_like(ratio))
    return Loss(scale * tokens.log_probs, ~valid, (ratio > c) & valid)

"""GMPO: the geometric mean of a sequence's ratios, clipped token by token (Zhao et al. 2025, arXiv:2507.20673).

    l_t = pi - old, moved pessimistically into [-lo, hi]: min(l, clip(l)) where A > 0, max(l, clip(l)) where A < 0
    rho_seq = exp(mean_t l_t)      L_row = -mean_t(A) * rho_seq * exp(mean_t ln w)

A row's loss, averaged over the global sequences with a trainable token. l has no bound of its own; the exponent of rho_seq is capped at 20,
so that a far row of negative advantage is large and not infinite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algorithms.losses.tokens import LOG_RATIO_LIMIT, Loss, Tokens, clip_range, policy_loss
from streamrl.algorithms.masks import masked_mean
from streamrl.config.training import ActorConfig

WEIGHT_FLOOR = 1e-10  # a weight of 0 (IcePop) makes the row's geometric mean small, not NaN


@policy_loss("geo_mean")
def geo_mean(tokens: Tokens, config: ActorConfig) -> Loss:
    """Log-ratios 0.3 and 0.1, A = 1, hi = 0.2: the first is cut to 0.2, the row gives -exp(0.15)."""
    low, high = clip_range(config)
    advantages, mask = tokens.advantages, tokens.mask
    log_ratio = tokens.log_ratio
    clamped = log_ratio.clamp(-low, high)
    sign = advantages.sign()
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * clamped)
    rows_B = -masked_mean(advantages, mask, dim=1) * _mean_exp(pessimistic, mask)
    if tokens.weights is not None:
        rows_B = rows_B * _mean_exp((tokens.weights + WEIGHT_FLOOR).log(), mask)
    outside = log_ratio.detach() != clamped.detach()
    return Loss(rows_B, outside & (advantages > 0), outside & (advantages < 0))


def _mean_exp(exponents: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(exponents, mask, dim=1).clamp(max=LOG_RATIO_LIMIT).exp()

"""PPO's clipped objective with dual clip.

    rho = exp(pi - old)     pi - old clamped to [-20, 20]
    L = max(-A rho, -A clip(rho, 1 - lo, 1 + hi));  where A < 0 also L = min(L, -A c)

so a token with a negative advantage never pushes harder than ``c`` times. Importance weights multiply L before aggregation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algorithms.losses.aggregate import agg_loss
from streamrl.algorithms.losses.registry import LOSSES
from streamrl.algorithms.masks import masked, masked_sum
from streamrl.config.training import ActorConfig

LOG_RATIO_LIMIT = 20.0  # exp(20) is far beyond any clip and far below the float32 limit


@LOSSES.register("vanilla")
def vanilla(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """All inputs [B, T]. With lo = hi = 0.2, c = 3: (rho, A) = (2, 1) gives -1.2, (5, -1) gives 3.0, (0.5, -1) gives 0.8."""
    low, high, dual = clip_range(config or ActorConfig())
    log_ratio = masked(log_probs - old_log_probs, loss_mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    pessimistic = torch.maximum(plain, clipped)
    bound = -advantages * dual
    loss = torch.where(advantages < 0, torch.minimum(pessimistic, bound), pessimistic)
    if rollout_is_weights is not None:
        loss = loss * rollout_is_weights
    scalar = agg_loss(
        loss,
        loss_mask,
        loss_agg_mode,
        dp_size=dp_size,
        batch_num_tokens=batch_num_tokens,
        global_batch_size=global_batch_size,
        loss_scale_factor=loss_scale_factor,
    )
    with torch.no_grad():
        tokens = batch_num_tokens if batch_num_tokens is not None else loss_mask.bool().sum().clamp(min=1)
        metrics = {
            "pg_clipfrac": masked_sum((clipped > plain).float(), loss_mask) / tokens,
            "pg_clipfrac_lower": masked_sum(((pessimistic > bound) & (advantages < 0)).float(), loss_mask) / tokens,
            "ppo_kl": masked_sum(-log_ratio, loss_mask) / tokens,
            "ratio_max": masked(ratio, loss_mask).max(),
            "loss_tokens": loss_mask.bool().sum().float(),
        }
    return scalar, metrics


def clip_range(config: ActorConfig) -> tuple[float, float, float]:
    """(low, high, dual-clip constant); an unset side follows ``clip_ratio``."""
    if config.clip_ratio_c <= 1:
        raise ValueError(f"clip_ratio_c bounds a ratio above 1, got {config.clip_ratio_c}; set actor.clip_ratio_c above 1 (3.0 is usual)")
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high, config.clip_ratio_c

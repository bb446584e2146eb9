"""Importance weights.

    token w = exp(clamp(lr, +-20))      sequence w = exp(clamp(sum_t lr, +-20)) on all tokens of the row

A threshold x truncates from above (TIS, w = min(w, x): small weights stay); "low_high" zeroes what lies outside (IcePop). Batch normalization
divides by the mean weight of the given batch, over tokens or over rows, unless that is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algorithms.masks import masked, masked_mean
from streamrl.config.corrections import parse_threshold
from streamrl.config.training import RolloutCorrection

LOG_RATIO_LIMIT = 20.0
SMALLEST_MEAN = 1e-8  # a batch whose weights are all zero is not normalized


def importance_weights(log_ratio: Tensor, mask: Tensor, config: RolloutCorrection) -> Tensor | None:
    """[B, T], 0 where masked; None when ``rollout_is`` is null. ``log_ratio`` is 0 where masked."""
    if config.rollout_is is None:
        return None
    low, high = parse_threshold(config.rollout_is_threshold)
    raw = raw_weights(log_ratio, mask, config.rollout_is)
    weights = raw.clamp(max=high) if low is None else torch.where((raw >= low) & (raw <= high), raw, torch.zeros_like(raw))
    return _normalized(weights, mask, config.rollout_is) if config.rollout_is_batch_normalize else weights


def raw_weights(log_ratio: Tensor, mask: Tensor, level: str | None) -> Tensor:
    """Before any threshold."""
    exponent = log_ratio if level == "token" else log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
    return masked(exponent.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), mask)


def _normalized(weights: Tensor, mask: Tensor, level: str) -> Tensor:
    if level == "token":
        mean = masked_mean(weights, mask)
    else:
        mean = masked_mean(masked_mean(weights, mask, dim=1), mask.bool().any(1))
    return weights / mean if mean > SMALLEST_MEAN else weights

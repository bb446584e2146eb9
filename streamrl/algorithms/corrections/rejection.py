"""Rejection: tokens or whole rows on which the two policies are too far apart do not count. All rules must accept.

    k1 = -lr in [ln low, ln high]      k2 = lr^2 / 2 <= high      k3 = exp(lr) - 1 - lr <= high      lr clamped to [-20, 20]

``token_k`` looks at each token; ``seq_sum_k``, ``seq_mean_k`` and ``seq_max_k`` at a statistic over the row's own tokens and take the whole row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from streamrl.algorithms.corrections.weights import LOG_RATIO_LIMIT
from streamrl.algorithms.masks import masked, masked_mean
from streamrl.config.corrections import Rejection, parse_rejections
from streamrl.config.training import RolloutCorrection


def accepted(log_ratio: Tensor, mask: Tensor, config: RolloutCorrection) -> Tensor | None:
    """bool [B, T], None without rules. "seq_mean_k1" at 2.0 rejects a row whose mean lr is 0.7 or more. Masked slots follow their row."""
    if config.rollout_rs is None:
        return None
    bounded = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    accept = torch.ones_like(mask, dtype=torch.bool)
    for rejection in parse_rejections(config.rollout_rs, config.rollout_rs_threshold):
        accept &= _accepts(rejection, bounded, mask)
    return accept


def _accepts(rejection: Rejection, log_ratio: Tensor, mask: Tensor) -> Tensor:
    divergence = masked(_estimate(rejection.estimator, log_ratio), mask)
    if rejection.level == "token":
        return _within(rejection, divergence) | ~mask.bool()
    statistic_B = {"sum": divergence.sum(1), "mean": masked_mean(divergence, mask, dim=1), "max": _row_max(divergence)}[rejection.level]
    return (_within(rejection, statistic_B) | ~mask.bool().any(1)).unsqueeze(1).expand_as(mask)


def _estimate(estimator: str, log_ratio: Tensor) -> Tensor:
    if estimator == "k1":
        return -log_ratio
    return 0.5 * log_ratio.square() if estimator == "k2" else log_ratio.exp() - 1 - log_ratio


def _row_max(divergence: Tensor) -> Tensor:
    """Of k2 or k3, which are never negative: masked slots (0) cannot win over a token."""
    return divergence.amax(1) if divergence.shape[1] else divergence.sum(1)


def _within(rejection: Rejection, value: Tensor) -> Tensor:
    if rejection.low is None:
        return value <= rejection.high
    return (value >= math.log(rejection.low)) & (value <= math.log(rejection.high))

"""Numbers that tell early that a run goes wrong: engine and learner drift apart, ratios spread, entropy falls, groups lose their signal.

Every function takes one batch and gives floats. None of them raises on values: masked slots, fully masked rows and NaN entries are skipped, and
what has nothing to look at is 0.0, never NaN. They say nothing of causes and keep no history. Shapes: B rows, T response tokens, S samples.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
QUANTILES = (0.01, 0.5, 0.99, 0.999)


@torch.no_grad()
def policy_diagnostics(old_log_probs_BT: Tensor, log_probs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *, low: float, high: float) -> dict[str, float]:
    """Of an update: quantiles of the ratio pi / old, KL(old || pi) three ways, and the tokens outside of [1 - low, 1 + high] by the side that clips.

    k1 and k3 estimate the same number; k1 negative or k3 far above it means a few far tokens. ``clip_low`` is the share of tokens of negative
    advantage below the range, ``clip_high`` of positive advantage above it.
    """
    log_ratio, advantages = _kept(mask_BT, log_probs_BT - old_log_probs_BT, advantages_BT)
    bounded = log_ratio.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = np.exp(bounded)
    named = {f"ratio_p{100 * q:g}": value for q, value in zip(QUANTILES, _quantiles(ratio, QUANTILES), strict=True)}
    return named | {
        "ratio_max": _peak(ratio),
        "kl_k1": _mean(-log_ratio),
        "kl_k2": _mean(0.5 * bounded**2),
        "kl_k3": _mean(ratio - 1 - bounded),
        "clip_low": _mean((ratio < 1 - low) & (advantages < 0)),
        "clip_high": _mean((ratio > 1 + high) & (advantages > 0)),
    }


@torch.no_grad()
def effective_sample_size(weights_BT: Tensor, mask_BT: Tensor) -> float:
    """(sum w)^2 / (n sum w^2): 1 when all weights are equal, 1/n when one token carries the batch, 0 when all are 0."""
    (weights,) = _kept(mask_BT, weights_BT)
    squares = float((weights**2).sum()) * len(weights)
    return float(weights.sum()) ** 2 / squares if squares > 0 else 0.0


@torch.no_grad()
def entropy_diagnostics(entropy_BT: Tensor, mask_BT: Tensor) -> dict[str, float]:
    """Mean over tokens, its lower tenth, and the share of tokens that are as good as certain (below 0.01 nats)."""
    (entropy,) = _kept(mask_BT, entropy_BT)
    return {"entropy_mean": _mean(entropy), "entropy_p10": _quantiles(entropy, (0.1,))[0], "entropy_near_zero": _mean(entropy < 0.01)}


@torch.no_grad()
def rejected_share(response_mask_BT: Tensor, loss_mask_BT: Tensor) -> float:
    """Model tokens without a loss, as a share of the model tokens."""
    written = response_mask_BT.bool()
    return _mean((~loss_mask_BT.bool())[written].cpu().numpy())


def zero_variance_share(scores_S: Sequence[float] | np.ndarray, groups_S: Sequence[Hashable]) -> float:
    """Groups of two or more finite scores that are all equal, as a share of those groups: prompts that teach nothing."""
    by_group: dict[Hashable, list[float]] = {}
    for score, group in zip(scores_S, groups_S, strict=True):
        if np.isfinite(score):
            by_group.setdefault(group, []).append(float(score))
    compared = [scores for scores in by_group.values() if len(scores) > 1]
    return _mean(np.array([min(scores) == max(scores) for scores in compared]))


@torch.no_grad()
def log_prob_gap(learner_BT: Tensor, engine_BT: Tensor, mask_BT: Tensor) -> dict[str, float]:
    """|learner - engine| in nats: over tokens (mean, 99th percentile, max) and the largest mean of a row, with that row's place (-1: no row)."""
    gap_BT = (learner_BT - engine_BT).abs().double()
    (gap,) = _kept(mask_BT, gap_BT)
    valid = mask_BT.bool() & torch.isfinite(gap_BT)
    count_B = valid.sum(1)
    mean_B = torch.where(valid, gap_BT, 0.0).sum(1) / count_B.clamp(min=1)
    ranked = torch.where(count_B > 0, mean_B, -1.0)
    worst = int(ranked.argmax()) if (count_B > 0).any() else -1
    return {
        "gap_mean": _mean(gap),
        "gap_p99": _quantiles(gap, (0.99,))[0],
        "gap_max": _peak(gap),
        "gap_row_max": float(mean_B[worst]) if worst >= 0 else 0.0,
        "gap_row_worst": float(worst),
    }


@torch.no_grad()
def rollout_probs_diff(old_log_probs_BT: Tensor, rollout_log_probs_BT: Tensor, mask_BT: Tensor) -> dict[str, float]:
    """Difference of the sampled tokens' probabilities. ``valid`` is 0, and the rest 0 instead of NaN, when no token is masked in."""
    kept = mask_BT.bool()
    learner, engine = old_log_probs_BT[kept].double().exp(), rollout_log_probs_BT[kept].double().exp()
    if not len(learner):
        return {
            f"training/rollout_{name}": 0.0 for name in ("probs_diff_valid", "probs_diff_mean", "probs_diff_max", "probs_diff_std", "actor_probs_pearson_corr")
        }
    gap = (learner - engine).abs()
    return {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_mean": gap.mean().item(),
        "training/rollout_probs_diff_max": gap.max().item(),
        "training/rollout_probs_diff_std": gap.std().item() if len(gap) > 1 else 0.0,
        "training/rollout_actor_probs_pearson_corr": pearson(learner, engine),
    }


def pearson(x: Tensor, y: Tensor) -> float:
    """Correlation; 1 when neither side varies (nothing contradicts agreement), 0 when only one does."""
    x, y = x - x.mean(), y - y.mean()
    scale = (x.square().sum() * y.square().sum()).sqrt()
    if scale > 0:
        return (torch.dot(x, y) / scale).item()
    return 1.0 if not x.any() and not y.any() else 0.0


def _kept(mask_BT: Tensor, *values_BT: Tensor) -> list[np.ndarray]:
    """The tokens of the mask on which all values are finite, flat, float64."""
    kept = mask_BT.bool()
    flat = [value[kept].double().cpu().numpy() for value in values_BT]
    finite = np.logical_and.reduce([np.isfinite(values) for values in flat])
    return [values[finite] for values in flat]


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0


def _peak(values: np.ndarray) -> float:
    return float(values.max()) if len(values) else 0.0


def _quantiles(values: np.ndarray, at: Sequence[float]) -> list[float]:
    return [float(value) for value in np.quantile(values, at)] if len(values) else [0.0] * len(at)

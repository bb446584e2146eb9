"""Numbers that say whether engine and learner compute the same policy. On an on-policy batch they differ by numerics only."""

from __future__ import annotations

import torch
from torch import Tensor


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

"""Rollout correction: the learner's proximal policy (old) and the engine's policy (mu) are not the same function, so the loss is reweighted.

    lr = old - mu (0 where masked)      token weight w = exp(clamp(lr, +-20))      sequence weight w = exp(clamp(sum_t lr, +-20)) on all tokens

A threshold x truncates from above (TIS: w = min(w, x)); "lo_hi" zeroes what lies outside (IcePop); the mask is unchanged by both. Weights
are detached. Covers importance weights; nothing is rejected here, so ``accept`` is None. Shapes: B rows, T response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algorithms.masks import masked, masked_mean, masked_sum
from streamrl.config.training import RolloutCorrection

LOG_RATIO_LIMIT = 20.0


def rollout_correction(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, config: RolloutCorrection | None = None
) -> tuple[Tensor | None, Tensor | None, dict[str, float]]:
    """(weights [B, T] or None, accept [B, T] or None, metrics). Token lr = [.5, -.2, 1.0] at threshold 2 gives [1.648721, 0.818731, 2.0]."""
    config = config or RolloutCorrection()
    _check_shapes(old_log_probs, rollout_log_probs, response_mask)
    log_ratio = masked(old_log_probs - rollout_log_probs, response_mask).detach()
    metrics = mismatch_metrics(old_log_probs.detach(), rollout_log_probs, response_mask)
    if config.rollout_is is None:
        return None, None, metrics
    low, high = parse_threshold(config.rollout_is_threshold)
    raw = _raw_weights(log_ratio, response_mask, config.rollout_is)
    weights = raw.clamp(max=high) if low is None else torch.where((raw >= low) & (raw <= high), raw, torch.zeros_like(raw))
    return weights, None, metrics | weight_metrics(raw, weights, response_mask)


def parse_threshold(value: float | str) -> tuple[float | None, float]:
    """(low or None, high): 2.0 is (None, 2.0), "0.5_2.0" is (0.5, 2.0)."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"rollout_is_threshold is a number or 'low_high', got {value!r}; write 2.0 or '0.5_2.0'")
    try:
        bounds = [float(part) for part in value.split("_")] if isinstance(value, str) else [float(value)]
    except ValueError:
        bounds = []
    if len(bounds) not in (1, 2) or not all(0 < bound < float("inf") for bound in bounds) or bounds[0] > bounds[-1]:
        raise ValueError(f"rollout_is_threshold needs positive bounds with low <= high, got {value!r}; write 2.0 or '0.5_2.0'")
    return (None if len(bounds) == 1 else bounds[0]), bounds[-1]


def _raw_weights(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    if level == "token":
        exponent = log_ratio
    elif level == "sequence":
        exponent = log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
    else:
        raise ValueError(f"rollout_is must be null, 'token' or 'sequence', got {level!r}; correct algorithm.rollout_correction.rollout_is")
    return masked(exponent.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), mask)


def _check_shapes(old: Tensor, rollout: Tensor, mask: Tensor) -> None:
    if not old.shape == rollout.shape == mask.shape:
        shapes = tuple(old.shape), tuple(rollout.shape), tuple(mask.shape)
        raise ValueError(f"old_log_probs, rollout_log_probs and response_mask have one shape, got {shapes}; pad them to the same width")
    if not mask.bool().any():
        raise ValueError("a batch has at least one token written by the model, got none; the rollout must end such sessions as failed")


def weight_metrics(raw: Tensor, weights: Tensor, mask: Tensor) -> dict[str, float]:
    """Of the weights before (mean, max) and after truncation (effective sample size as a share of the tokens)."""
    count = mask.bool().sum()
    squares = masked_sum(weights.double() ** 2, mask) * count
    ess = masked_sum(weights.double(), mask) ** 2 / squares if squares > 0 else torch.zeros(())
    return {
        "rollout_corr/is_mean": masked_mean(raw, mask).item(),
        "rollout_corr/is_max": masked(raw, mask).max().item(),
        "rollout_corr/ess_ratio": float(ess),
        "rollout_corr/truncated_ratio": masked_mean((weights != raw).float(), mask).item(),
    }


def mismatch_metrics(old: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, float]:
    """How far engine and learner are apart: KL(mu || old), perplexities per row, chi squared."""
    rows = mask.bool().any(1)
    old, rollout, mask = masked(old, mask)[rows].double(), masked(rollout, mask)[rows].double(), mask[rows]
    log_ratio = old - rollout
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    row_ratio = log_ratio.sum(1).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    training_B, rollout_B = masked_mean(old, mask, dim=1), masked_mean(rollout, mask, dim=1)
    gap_B = rollout_B - training_B
    return {
        "rollout_corr/training_ppl": (-training_B).exp().mean().item(),
        "rollout_corr/rollout_ppl": (-rollout_B).exp().mean().item(),
        "rollout_corr/log_ppl_diff": gap_B.mean().item(),
        "rollout_corr/log_ppl_abs_diff": gap_B.abs().mean().item(),
        "rollout_corr/log_ppl_diff_max": gap_B.max().item(),
        "rollout_corr/log_ppl_diff_min": gap_B.min().item(),
        "rollout_corr/ppl_ratio": gap_B.exp().mean().item(),
        "rollout_corr/kl": masked_mean(-log_ratio, mask).item(),
        "rollout_corr/k3_kl": masked_mean(ratio - log_ratio - 1, mask).item(),
        "rollout_corr/chi2_token": masked_mean(ratio**2, mask).item() - 1,
        "rollout_corr/chi2_seq": (row_ratio**2).mean().item() - 1,
    }

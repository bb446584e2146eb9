"""Rollout correction: the learner's proximal policy (old) and the engine's policy (mu) are not the same function, so tokens are reweighted.

    lr = old - mu (0 where masked); in bypass mode pi - mu

``weights`` multiply the loss, ``accept`` says which tokens count at all, and the metrics say how far the two policies are apart. The three
are independent: a weight of 0 (IcePop) leaves the mask as it is. Everything is detached. Thresholds are read, and refused, by
``streamrl.config.corrections``. Shapes: B rows, T response tokens.
"""

from __future__ import annotations

from torch import Tensor

from streamrl.algorithms.corrections.metrics import lag_metrics, mismatch_metrics, rejection_metrics, weight_metrics
from streamrl.algorithms.corrections.rejection import accepted
from streamrl.algorithms.corrections.weights import LOG_RATIO_LIMIT, importance_weights, raw_weights
from streamrl.algorithms.masks import masked
from streamrl.config.corrections import parse_threshold
from streamrl.config.training import RolloutCorrection

__all__ = ["LOG_RATIO_LIMIT", "accepted", "importance_weights", "parse_threshold", "rollout_correction"]


def rollout_correction(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: RolloutCorrection | None = None,
    *,
    lags: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, dict[str, float]]:
    """(weights [B, T] or None, accept bool [B, T] or None, metrics). Token lr = [.5, -.2, 1.0] at threshold 2 gives [1.648721, 0.818731, 2.0].

    ``lags`` are the versions between the sampling and this step, [B] a row or [B, T] a token; None: no metrics by lag.
    """
    config = config or RolloutCorrection()
    _check_shapes(old_log_probs, rollout_log_probs, response_mask)
    old, rollout = masked(old_log_probs.detach(), response_mask), masked(rollout_log_probs.detach(), response_mask)
    log_ratio = old - rollout
    accept = accepted(log_ratio, response_mask, config)
    weights = importance_weights(log_ratio, response_mask, config)
    metrics = mismatch_metrics(old, rollout, response_mask) | rejection_metrics(accept, weights, response_mask)
    cut = None
    if weights is not None:
        raw = raw_weights(log_ratio, response_mask, config.rollout_is)
        cut = _outside(raw, config.rollout_is_threshold)
        metrics |= weight_metrics(raw, weights, cut, response_mask)
    if lags is not None:
        metrics |= lag_metrics(log_ratio, cut, response_mask, lags)
    return weights, accept, metrics


def _outside(raw: Tensor, threshold: float | str) -> Tensor:
    low, high = parse_threshold(threshold)
    return raw > high if low is None else (raw > high) | (raw < low)


def _check_shapes(old: Tensor, rollout: Tensor, mask: Tensor) -> None:
    if not old.shape == rollout.shape == mask.shape:
        shapes = tuple(old.shape), tuple(rollout.shape), tuple(mask.shape)
        raise ValueError(f"old_log_probs, rollout_log_probs and response_mask have one shape, got {shapes}; pad them to the same width")
    if not mask.bool().any():
        raise ValueError("a batch has at least one token written by the model, got none; the rollout must end such sessions as failed")

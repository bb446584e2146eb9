"""Policy losses as a user writes them, right and wrong."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from streamrl.algorithms.losses import agg_loss


def plain_numbers(old_log_probs: Tensor, log_probs: Tensor, advantages: Tensor, loss_mask: Tensor, **keywords: Any) -> tuple[Tensor, dict]:
    values = -advantages * log_probs
    return agg_loss(values, loss_mask, "token-mean", batch_num_tokens=keywords["batch_num_tokens"], dp_size=keywords["dp_size"]), {"mine": 0.25, "count": 3}


def without_row_weights(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    loss_agg_mode: Any = None,
    config: Any = None,
    rollout_is_weights: Any = None,
    dp_size: int = 1,
    batch_num_tokens: Any = None,
    global_batch_size: Any = None,
    loss_scale_factor: Any = None,
) -> tuple[Tensor, dict]:
    whole = {"dp_size": dp_size, "batch_num_tokens": batch_num_tokens, "global_batch_size": global_batch_size}
    return agg_loss(-advantages * log_probs, loss_mask, loss_agg_mode or "token-mean", **whole), {}


def of_each_row(old_log_probs: Tensor, log_probs: Tensor, advantages: Tensor, loss_mask: Tensor, **keywords: Any) -> tuple[Tensor, dict]:
    return (-advantages * log_probs).sum(1), {}


def detached(old_log_probs: Tensor, log_probs: Tensor, advantages: Tensor, loss_mask: Tensor, **keywords: Any) -> tuple[Tensor, dict]:
    return log_probs.detach().sum(), {}


def no_pair(old_log_probs: Tensor, log_probs: Tensor, advantages: Tensor, loss_mask: Tensor, **keywords: Any) -> Tensor:
    return log_probs.sum()


def vector_metric(old_log_probs: Tensor, log_probs: Tensor, advantages: Tensor, loss_mask: Tensor, **keywords: Any) -> tuple[Tensor, dict]:
    return log_probs.sum(), {"mine": advantages}


def few_keywords(old_log_probs: Tensor, log_probs: Tensor, advantages: Tensor, loss_mask: Tensor, config: Any = None) -> tuple[Tensor, dict]:
    return log_probs.sum(), {}

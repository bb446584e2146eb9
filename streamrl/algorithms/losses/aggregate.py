"""From a loss per token to one scalar. The denominator is that of the whole mini-batch over all ranks, never of a micro-batch.

    token-mean               sum / batch_num_tokens * dp
    token-sum                sum * dp
    seq-mean-token-sum       sum_i(token sum) / global_batch_size * dp
    seq-mean-token-sum-norm  the previous / loss_scale_factor
    seq-mean-token-mean      sum_i(token mean) / global_batch_size * dp

``dp`` undoes the averaging of gradients over ranks. Without globals the local counts are used; a fully masked row counts nowhere.
"""

from __future__ import annotations

from torch import Tensor

from streamrl.algorithms.masks import masked_sum

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


def agg_loss(
    loss: Tensor,
    mask: Tensor,
    mode: str,
    *,
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """``loss`` and ``mask`` are [B, T]. Loss [[1,2,9],[3,9,9]] under mask [[1,1,0],[1,0,0]] gives 2 (token-mean), 2.25 (seq-mean-token-mean)."""
    if mode not in MODES:
        raise ValueError(f"loss_agg_mode must be one of {', '.join(MODES)}, got {mode!r}; correct actor.loss_agg_mode")
    if mode == "token-sum":
        return masked_sum(loss, mask) * dp_size
    if mode == "token-mean":
        return masked_sum(loss, mask) / _denominator(batch_num_tokens, mask.bool().sum(), "batch_num_tokens", dp_size) * dp_size
    per_row_B = masked_sum(loss, mask, dim=1)
    if mode == "seq-mean-token-mean":
        per_row_B = per_row_B / mask.bool().sum(1).clamp(min=1)
    total = per_row_B.sum() / _denominator(global_batch_size, mask.bool().any(1).sum(), "global_batch_size", dp_size) * dp_size
    return total / _scale(loss_scale_factor) if mode == "seq-mean-token-sum-norm" else total


def _denominator(given: float | Tensor | None, local: Tensor, name: str, dp_size: int) -> float | Tensor:
    if given is not None:
        return given
    if dp_size > 1:
        raise ValueError(f"dp_size > 1 needs {name} over all ranks, got none with dp_size={dp_size}; all-reduce it before the first micro-batch")
    return local.clamp(min=1)


def _scale(factor: float | None) -> float:
    if factor is None or factor <= 0:
        raise ValueError(f"seq-mean-token-sum-norm divides by a positive loss_scale_factor, got {factor}; pass data.max_response_length")
    return factor

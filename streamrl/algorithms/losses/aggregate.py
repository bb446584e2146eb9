"""From a loss per token to one scalar. The denominator is that of the whole mini-batch over all ranks, never of a micro-batch.

    token-mean               sum / batch_num_tokens * dp
    token-sum                sum * dp
    seq-mean-token-sum       sum_i(w_i * token sum) / global_batch_size * dp
    seq-mean-token-sum-norm  the previous / loss_scale_factor
    seq-mean-token-mean      sum_i(w_i * token mean) / global_batch_size * dp

``dp`` undoes the averaging of gradients over ranks. ``w`` is 1, or the row weights that let a session of several rows count once. Without
globals the local counts are used; a fully masked row counts nowhere. Shapes: B rows, T response tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from streamrl.algorithms.masks import masked
from streamrl.config.losses import AGG_MODES as MODES


def agg_loss(
    loss: Tensor,
    mask: Tensor,
    mode: str,
    *,
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
    row_weights: Tensor | None = None,
) -> Tensor:
    """``loss`` and ``mask`` are [B, T]. Loss [[1,2,9],[3,9,9]] under mask [[1,1,0],[1,0,0]] gives 2 (token-mean), 2.25 (seq-mean-token-mean)."""
    return agg_clean(
        masked(loss, mask),
        mask.bool(),
        mode,
        dp_size=dp_size,
        batch_num_tokens=batch_num_tokens,
        global_batch_size=global_batch_size,
        loss_scale_factor=loss_scale_factor,
        row_weights=row_weights,
    )


def agg_clean(
    loss: Tensor,
    mask: Tensor,
    mode: str,
    *,
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
    row_weights: Tensor | None = None,
) -> Tensor:
    """``agg_loss`` of a loss that is 0 in its masked slots already, under a bool mask."""
    _check_ranks(dp_size)
    if mode not in MODES:
        raise ValueError(f"loss_agg_mode must be one of {', '.join(MODES)}, got {mode!r}; correct actor.loss_agg_mode")
    if mode == "token-sum":
        return loss.sum() * dp_size
    if mode == "token-mean":
        return loss.sum() / _denominator(batch_num_tokens, mask.sum, "batch_num_tokens", dp_size) * dp_size
    per_row_B = loss.sum(1)
    if mode == "seq-mean-token-mean":
        per_row_B = per_row_B / mask.sum(1).clamp(min=1)
    total = mean_of_rows(per_row_B, mask, dp_size=dp_size, global_batch_size=global_batch_size, row_weights=row_weights)
    return total / _scale(loss_scale_factor) if mode == "seq-mean-token-sum-norm" else total


def mean_of_rows(
    per_row_B: Tensor, mask: Tensor, *, dp_size: int = 1, global_batch_size: float | Tensor | None = None, row_weights: Tensor | None = None
) -> Tensor:
    """Mean over the global sequences; a fully masked row is none of them."""
    _check_ranks(dp_size)
    counted_B = (mask.sum(1) > 0).to(per_row_B.dtype)
    if row_weights is not None:
        counted_B = counted_B * row_weights.to(per_row_B)
        per_row_B = per_row_B * counted_B
    return per_row_B.sum() / _denominator(global_batch_size, counted_B.sum, "global_batch_size", dp_size) * dp_size


def session_weights(sessions: Sequence[Hashable], loss_mask: Tensor) -> Tensor:
    """[B] row weights under which each session counts once: 1 / (its rows with a trainable token). ``sessions`` names each row's session.

    Their sum over rows with a trainable token is the ``global_batch_size`` that goes with them. Rows of sessions a, a, b with tokens in all
    but the second give 1, 0, 1; with tokens in all three 0.5, 0.5, 1.
    """
    trainable = loss_mask.bool().any(1).tolist()
    rows = Counter(session for session, counts in zip(sessions, trainable, strict=True) if counts)
    weights = [1 / rows[session] if counts else 0.0 for session, counts in zip(sessions, trainable, strict=True)]
    return torch.tensor(weights, dtype=torch.float64, device=loss_mask.device)


def _denominator(given: float | Tensor | None, count: Callable[[], Tensor], name: str, dp_size: int) -> float | Tensor:
    if given is not None:
        return given
    if dp_size > 1:
        raise ValueError(f"dp_size > 1 needs {name} over all ranks, got none with dp_size={dp_size}; all-reduce it before the first micro-batch")
    local = count()
    return torch.where(local > 0, local, 1)


def _check_ranks(dp_size: int) -> None:
    if dp_size < 1:
        raise ValueError(f"dp_size counts ranks, at least 1, got {dp_size}; pass the number of learner ranks")


def _scale(factor: float | None) -> float:
    if factor is None or factor <= 0:
        raise ValueError(f"seq-mean-token-sum-norm divides by a positive loss_scale_factor, got {factor}; pass data.max_response_length")
    return factor

"""The critic's clipped regression loss, beside the policy losses because it is aggregated and reduced as they are.

L = 0.5 * agg(max((v - R)^2, (clip(v, V - c, V + c) - R)^2))      V: the values that the advantages were computed with
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamrl.algorithms.losses.aggregate import agg_loss
from streamrl.algorithms.losses.tokens import as_mask
from streamrl.algorithms.masks import masked


def value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    *,
    cliprange_value: float = 0.5,
    loss_agg_mode: str = "token-mean",
    batch_num_tokens: float | Tensor | None = None,
    **aggregation: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """All [B, T]. v = 2, V = 1, R = 0, c = 0.5: both errors are 4 and 2.25, the loss is 2. v = 1, V = 2, R = 0: clipped to 1.5, 1.125."""
    mask = as_mask(loss_mask, vpreds=vpreds, returns=returns, values=values)
    if not cliprange_value > 0:
        raise ValueError(f"cliprange_value bounds the move of a value, got {cliprange_value}; set it above 0 (0.5 is usual)")
    predicted, before, target = masked(vpreds, mask), masked(values, mask).detach(), masked(returns, mask).detach()
    bounded = torch.maximum(torch.minimum(predicted, before + cliprange_value), before - cliprange_value)
    plain, clipped = (predicted - target).square(), (bounded - target).square()
    scalar = 0.5 * agg_loss(torch.maximum(plain, clipped), mask, loss_agg_mode, batch_num_tokens=batch_num_tokens, **aggregation)
    with torch.no_grad():
        count = mask.sum().clamp(min=1) if batch_num_tokens is None else batch_num_tokens
        share = ((clipped > plain) & mask).sum().to(scalar.dtype) / count
    return scalar, {"vf_clipfrac": share}

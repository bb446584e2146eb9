"""Variance under a mask, and whitening with it. Statistics are float64 over the masked-in entries alone, gathered in row order: neither
padding nor what stands in a masked slot (NaN included) changes a bit of the result.

Covers the entries it is given: called with the whole training batch, as the advantage stage does, the statistics are those of all ranks.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

EPSILON = 1e-8


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance (n - 1). One value has none: 2 and 4 give 2, a single 4 is an error."""
    kept = x[mask.bool()].double()
    if len(kept) < 2:
        raise ValueError(f"a variance needs at least two entries with the mask on, got {len(kept)}; check the mask")
    return kept.var()


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) where the mask is on, 0 elsewhere. Fewer than two entries: x - mean (that is 0), and a warning.

    x = [0.46, 9, 0.8] with mask [1, 0, 1] gives [-0.707107, 0, 0.707107].
    """
    on = mask.bool()
    kept = x[on].double()
    centred = kept - kept.mean() if len(kept) else kept
    if len(kept) < 2:
        logger.warning("whitening needs at least two tokens, got %d: the scale is left as it is", len(kept))
    else:
        centred = centred * torch.rsqrt(centred.square().sum() / (len(kept) - 1) + EPSILON)
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device).masked_scatter_(on, centred.float())

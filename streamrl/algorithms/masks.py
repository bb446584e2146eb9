"""Sums and means under a mask. A masked-out entry contributes nothing to value or gradient, also when it is NaN or infinite.

Shapes: B rows, T response tokens. Never ``x * mask``: NaN times zero is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` where the mask is on, exactly 0 elsewhere."""
    return torch.where(mask.bool(), x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum over all entries, or over ``dim``, with the mask on."""
    kept = masked(x, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum divided by the number of entries with the mask on; 0 when there are none."""
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_sum(x, mask, dim) / (count + 1e-8)

"""Masked slots made exactly 0 in value and gradient, whatever they hold: the bits of a number and the bits of the mask.

``torch.where`` does the same; on a CPU it costs four times as much as a product, and a cheap loss would spend half of its time in it. A product
is no way out: NaN times zero is NaN. Where the mask is on, a value passes untouched, NaN included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BITS = {torch.float64: torch.int64, torch.float32: torch.int32}


def bits_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """For ``cut`` of tensors of ``dtype``: all bits on where the bool mask is on, none elsewhere."""
    return mask.to(_BITS[dtype]).neg_()


def cut(x: Tensor, bits: Tensor) -> Tensor:
    """``x`` where the mask of ``bits`` is on, exactly 0 elsewhere; the gradient likewise."""
    return _Cut.apply(x, bits)


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: Tensor) -> Tensor:
        ctx.save_for_backward(bits)
        return (x.view(bits.dtype) & bits).view(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (bits,) = ctx.saved_tensors
        return _Cut.apply(gradients[0], bits), None

"""Of rows of logits: the log-prob of a token, the entropy, the sum of squared probabilities, with a gradient that needs no second row of logits.

Computed in float32, a few rows at a time, so that what lies between the logits and a row's three numbers stays in the cache. The backward pass writes the
gradient over the logits: nothing else may read them, which the head's output fulfils. ``sum_pi_squared`` has no gradient.

Shapes: N rows, V vocabulary, C rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CPU_BLOCK_LOGITS = 1 << 20  # 4 MiB in float32: a block stays in the cache
_GPU_BLOCK_LOGITS = 1 << 25  # enough to fill it


class TokenStatistics(torch.autograd.Function):
    """(logits [N, V], labels [N], temperature, with_entropy, with_squares) -> log_probs, entropy, sum_pi_squared; empty when not asked for."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, temperature: float, with_entropy: bool, with_squares: bool) -> tuple[Tensor, Tensor, Tensor]:
        log_probs_N, normaliser_N = (torch.empty(len(labels_N), dtype=torch.float32, device=logits_NV.device) for _ in range(2))
        entropy_N, squares_N = (torch.empty(len(labels_N) if wanted else 0, device=logits_NV.device) for wanted in (with_entropy, with_squares))
        for rows in _blocks(logits_NV):
            scaled_CV = _scaled(logits_NV[rows], temperature)
            normaliser_N[rows] = scaled_CV.logsumexp(-1)
            log_probs_N[rows] = scaled_CV.gather(-1, labels_N[rows, None]).squeeze(-1) - normaliser_N[rows]
            if with_entropy or with_squares:
                all_log_probs_CV = scaled_CV - normaliser_N[rows, None]
                probs_CV = all_log_probs_CV.exp()
                if with_entropy:
                    entropy_N[rows] = -(probs_CV * all_log_probs_CV).sum(-1)
                if with_squares:
                    squares_N[rows] = probs_CV.square_().sum(-1)
        ctx.save_for_backward(logits_NV, labels_N, normaliser_N, entropy_N)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(squares_N)
        ctx.set_materialize_grads(False)  # None for an entropy that no loss reads, which then costs nothing
        return log_probs_N, entropy_N, squares_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        """d log_prob = 1[label] - p and d entropy = -p (log p + entropy), both over the temperature."""
        logits_NV, labels_N, normaliser_N, entropy_N = ctx.saved_tensors
        of_log_probs_N = torch.zeros_like(normaliser_N) if gradients[0] is None else gradients[0] / ctx.temperature
        of_entropy_N = None if gradients[1] is None else gradients[1] / ctx.temperature
        for rows in _blocks(logits_NV):
            block_CV = logits_NV[rows]
            log_probs_CV = _scaled(block_CV, ctx.temperature) - normaliser_N[rows, None]
            if of_entropy_N is not None and len(entropy_N):
                factor_CV = (log_probs_CV + entropy_N[rows, None]).mul_(-of_entropy_N[rows, None]).sub_(of_log_probs_N[rows, None])
                gradient_CV = log_probs_CV.exp_().mul_(factor_CV)
            else:
                gradient_CV = log_probs_CV.exp_().mul_(-of_log_probs_N[rows, None])
            gradient_CV.scatter_add_(-1, labels_N[rows, None], of_log_probs_N[rows, None])
            block_CV.copy_(gradient_CV)
        return logits_NV, None, None, None, None


def _blocks(logits_NV: Tensor) -> Iterator[slice]:
    logits = _CPU_BLOCK_LOGITS if logits_NV.device.type == "cpu" else _GPU_BLOCK_LOGITS
    size = max(1, logits // logits_NV.shape[1])
    return (slice(start, start + size) for start in range(0, len(logits_NV), size))


def _scaled(logits_CV: Tensor, temperature: float) -> Tensor:
    """In float32; the logits themselves where nothing changes them."""
    wide_CV = logits_CV.float()
    return wide_CV if temperature == 1.0 else wide_CV / temperature

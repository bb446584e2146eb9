"""How far the policy is from a reference, token by token: d = pi - ref.

    k1 (kl)             d                                   exact in the mean; as a loss its expected gradient is 0
    abs                 |d|
    k2 (mse)            0.5 d^2                             as a loss: the true gradient of KL(pi || ref)
    k3 (low_var_kl)     exp(x) - x - 1, x = clamp(-d, +-20), result clamped to +-10: never negative; as a loss: the gradient of KL(ref || pi)
    k1+, abs+, k3+      the value of the base, the gradient of k2 (straight through)

For two actions of probability 0.8 and 0.2 against 0.5 and 0.5 (KL 0.1927) the expected gradient by one logit is 0 for k1, 0.300 for k3 and
0.2218, the true one, for k2 and every "+". "full" needs whole distributions and is not offered. See Schulman, "Approximating KL divergence" (2020).
Shapes: B rows, T response tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamrl.algorithms.losses.aggregate import agg_loss
from streamrl.algorithms.masks import masked, masked_mean

LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0
_NAMES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """[B, T]. pi = -1, ref = -1.5: k1 and abs 0.5, k2 0.125, k3 0.106531."""
    base, straight = kind.removesuffix("+"), kind.endswith("+")
    if base not in _NAMES:
        known = ", ".join([*_NAMES, "kl+", "k1+", "abs+", "low_var_kl+", "k3+"])
        raise NotImplementedError(f"a KL penalty is one of {known}, got {kind!r}; correct actor.kl_loss_type or algorithm.kl_penalty")
    if straight and _NAMES[base] == "k2":
        raise ValueError(f"{base} has its own gradient already, got {kind!r}; drop the '+'")
    if log_probs.shape != ref_log_probs.shape:
        shapes = f"{tuple(log_probs.shape)} and {tuple(ref_log_probs.shape)}"
        raise ValueError(f"log_probs and ref_log_probs have one shape, got {shapes}; pad them to the same width")
    difference = log_probs - ref_log_probs
    if not straight:
        return _estimate(difference, _NAMES[base])
    gradient = _estimate(difference, "k2")
    return _estimate(difference.detach(), _NAMES[base]) + (gradient - gradient.detach())


def kl_loss(
    log_probs: Tensor, ref_log_probs: Tensor, loss_mask: Tensor, kind: str, loss_agg_mode: str, *, batch_num_tokens: float | Tensor | None = None, **others: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """The penalty aggregated as a policy loss is; ``others`` are the rest of ``agg_loss``'s arguments. Masked slots may hold anything."""
    pi, ref = masked(log_probs, loss_mask), masked(ref_log_probs, loss_mask).detach()
    penalty = kl_penalty(pi, ref, kind)
    scalar = agg_loss(penalty, loss_mask, loss_agg_mode, batch_num_tokens=batch_num_tokens, **others)
    with torch.no_grad():
        tokens = loss_mask.bool().sum().clamp(min=1) if batch_num_tokens is None else batch_num_tokens
        clamped = is_clamped(pi - ref) if _NAMES[kind.removesuffix("+")] == "k3" else torch.zeros_like(pi, dtype=torch.bool)
        return scalar, {"kl_mean": masked(penalty, loss_mask).sum() / tokens, "kl_clamped_tokens": clamped.sum().to(pi.dtype)}


def kl_in_reward(
    token_level_scores: Tensor, old_log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, *, beta: float, kind: str = "kl"
) -> tuple[Tensor, float, int]:
    """(scores - beta KL(old, ref) on the tokens of ``mask``, the mean over rows of their mean KL, the number of those rows).

    ``mask`` leaves out rejected rows: they keep their scores and do not move the controller, which takes the last two.
    """
    penalty = kl_penalty(masked(old_log_probs, mask), masked(ref_log_probs, mask), kind).detach()
    rows_B = mask.bool().any(1)
    kl = masked_mean(masked_mean(penalty, mask, dim=1), rows_B)
    return token_level_scores - beta * masked(penalty, mask), float(kl), int(rows_B.sum())


def is_clamped(difference: Tensor) -> Tensor:
    """bool: tokens where k3 is at a bound, so that neither its value nor its gradient tells how far they are."""
    return (difference.abs() > LOG_RATIO_LIMIT) | (_raw_k3(difference) > K3_LIMIT)


def _estimate(difference: Tensor, name: str) -> Tensor:
    if name == "k1":
        return difference
    if name == "abs":
        return difference.abs()
    if name == "k2":
        return 0.5 * difference.square()
    return _raw_k3(difference).clamp(-K3_LIMIT, K3_LIMIT)


def _raw_k3(difference: Tensor) -> Tensor:
    x = (-difference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return x.exp() - x - 1

"""From a formula to a policy loss: what every loss of this folder shares, so that its file holds the formula alone.

A formula sees ``Tokens`` and gives a loss per token (or per row) with the tokens it clipped. Here the inputs are checked, masked slots are cut
off from value and gradient whatever they hold, importance weights multiply, and loss and metrics are divided by the same global denominators.
Shapes: B rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, update_wrapper
from typing import Any

import torch
from torch import Tensor

from streamrl.algorithms.losses.aggregate import agg_clean, mean_of_rows
from streamrl.algorithms.losses.cut import bits_of, cut
from streamrl.algorithms.losses.registry import LOSSES, PolicyLoss
from streamrl.config.losses import POLICY_LOSSES
from streamrl.config.training import ActorConfig

LOG_RATIO_LIMIT = 20.0  # exp(20) is far beyond any clip and far below the float32 limit


@dataclass(frozen=True)
class Tokens:
    """The inputs of a formula, each [B, T]. Masked slots of ``raw_*`` hold anything; the derived ones hold 0 there."""

    raw_old_log_probs: Tensor
    raw_log_probs: Tensor
    advantages: Tensor  # masked slots hold anything: whatever a formula makes of them is cut off behind it
    mask: Tensor  # bool
    weights: Tensor | None
    selected: Tensor | None  # bool, from the loss's ``select``

    @cached_property
    def bits(self) -> Tensor:
        """The mask as ``cut`` takes it."""
        return bits_of(self.mask, self.raw_log_probs.dtype)

    @cached_property
    def log_probs(self) -> Tensor:
        """pi, with the gradient."""
        return cut(self.raw_log_probs, self.bits)

    @cached_property
    def log_ratio(self) -> Tensor:
        """pi - old without a bound, with the gradient."""
        return cut(self.raw_log_probs - self.raw_old_log_probs, self.bits)

    @cached_property
    def bounded_log_ratio(self) -> Tensor:
        """l: pi - old within [-20, 20]."""
        return self.log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    @cached_property
    def ratio(self) -> Tensor:
        """rho = exp(l)."""
        return self.bounded_log_ratio.exp()


@dataclass(frozen=True)
class Loss:
    """What a formula gives. ``clipped`` and ``clipped_lower`` are bool [B, T]; None: this loss clips nothing on that side."""

    values: Tensor  # [B, T], or [B] when the formula is one of whole sequences and has applied the weights itself
    clipped: Tensor | None = None
    clipped_lower: Tensor | None = None


Formula = Callable[[Tokens, ActorConfig], Loss]
Select = Callable[..., Tensor]


def policy_loss(name: str, select: Select | None = None) -> Callable[[Formula], PolicyLoss]:
    """Decorator: registers the loss of this formula. ``select`` chooses tokens over a whole mini-batch, for a batch-dependent one."""

    def wrap(formula: Formula) -> PolicyLoss:
        traits = POLICY_LOSSES[name]

        def loss(
            old_log_probs: Tensor,
            log_probs: Tensor,
            advantages: Tensor,
            loss_mask: Tensor,
            *,
            loss_agg_mode: str | None = None,
            config: ActorConfig | None = None,
            rollout_is_weights: Tensor | None = None,
            dp_size: int = 1,
            batch_num_tokens: float | Tensor | None = None,
            global_batch_size: float | Tensor | None = None,
            loss_scale_factor: float | None = None,
            row_weights: Tensor | None = None,
            selected: Tensor | None = None,
        ) -> tuple[Tensor, dict[str, Tensor]]:
            config = config or ActorConfig()
            given = {} if rollout_is_weights is None else {"rollout_is_weights": rollout_is_weights}
            mask = as_mask(loss_mask, old_log_probs=old_log_probs, log_probs=log_probs, advantages=advantages, **given)
            if select is None and selected is not None:
                raise ValueError(f"{name} selects no tokens, got selected; pass it to a batch-dependent loss only")
            if select is not None and selected is None:
                selected = select(old_log_probs, log_probs, advantages, mask, config=config)
            dtype = torch.promote_types(log_probs.dtype, torch.float32)  # sums of half precision would lose tokens
            weights = None if rollout_is_weights is None else rollout_is_weights.detach().to(dtype)
            tokens = Tokens(old_log_probs.detach().to(dtype), log_probs.to(dtype), advantages.detach().to(dtype), mask, weights, selected)
            result = formula(tokens, config)
            rows: dict[str, Any] = {"dp_size": dp_size, "global_batch_size": global_batch_size, "row_weights": row_weights}
            if result.values.dim() == 1:
                scalar = mean_of_rows(result.values, mask, **rows)
            else:
                values = result.values if weights is None else result.values * weights
                mode = traits.default_mode if traits.fixed_mode or loss_agg_mode is None else loss_agg_mode
                scalar = agg_clean(cut(values, tokens.bits), mask, mode, batch_num_tokens=batch_num_tokens, loss_scale_factor=loss_scale_factor, **rows)
            return scalar, metrics_of(tokens, result, batch_num_tokens)

        update_wrapper(loss, formula, updated=())
        vars(loss).pop("__wrapped__")  # the call shape is the one above, not the formula's
        loss.batch_dependent, loss.select = traits.batch_dependent, select  # type: ignore[attr-defined]
        return LOSSES.register(name)(loss)

    return wrap


@torch.no_grad()
def metrics_of(tokens: Tokens, result: Loss, batch_num_tokens: float | Tensor | None) -> dict[str, Tensor]:
    """Shares of the mini-batch: they add up over micro-batches and ranks, ``ratio_max`` combines by maximum. Rejected: of weight exactly 0."""
    mask, log_ratio = tokens.mask, tokens.bounded_log_ratio.detach()
    local = _count(mask, log_ratio)
    count = local.clamp(min=1) if batch_num_tokens is None else batch_num_tokens
    none = log_ratio.new_zeros(())

    def tokens_of(chosen: Tensor | None) -> Tensor:
        return none if chosen is None else _count(chosen & mask, log_ratio)

    return {
        "pg_clipfrac": tokens_of(result.clipped) / count,
        "pg_clipfrac_lower": tokens_of(result.clipped_lower) / count,
        "ppo_kl": -log_ratio.sum() / count,
        "ratio_max": _highest(log_ratio, mask).exp(),
        "loss_tokens": local,
        "rejected_tokens": none if tokens.weights is None else local - cut(tokens.weights, tokens.bits).count_nonzero(),
    }


def _highest(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Over the tokens; -inf without one. Masked slots hold 0, so they can only hide a maximum that is not above 0."""
    if log_ratio.numel() and (peak := log_ratio.amax()) > 0:
        return peak
    tokens = log_ratio[mask]
    return tokens.amax() if len(tokens) else log_ratio.new_full((), -torch.inf)


def _count(chosen: Tensor, like: Tensor) -> Tensor:
    return chosen.sum(dtype=torch.int32).to(like.dtype)


def as_mask(mask: Tensor, **inputs: Tensor) -> Tensor:
    """``mask`` as bool. Advantages in its place would train the wrong tokens, so it must hold 0 and 1 only and have the inputs' shape."""
    wrong = {name: tuple(value.shape) for name, value in inputs.items() if value.shape != mask.shape}
    if wrong or mask.dim() != 2:
        raise ValueError(f"the inputs of a loss are [rows, tokens] of one shape, got loss_mask {tuple(mask.shape)} and {wrong}; pad them to one width")
    kept = mask.bool()
    if mask.dtype.is_floating_point:
        legal = torch.equal(kept.to(mask.dtype), mask)
    else:
        legal = mask.dtype == torch.bool or not mask.numel() or all(0 <= bound <= 1 for bound in mask.aminmax())
    if not legal:
        raise ValueError("loss_mask holds 0 and 1 only, got other values; pass old_log_probs, log_probs, advantages, loss_mask in this order")
    return kept


def clip_range(config: ActorConfig) -> tuple[float, float]:
    """(low, high); an unset side follows ``clip_ratio``."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high


def dual_clip(config: ActorConfig) -> float:
    """The bound of a negative advantage's ratio."""
    if config.clip_ratio_c <= 1:
        raise ValueError(f"clip_ratio_c bounds a ratio above 1, got {config.clip_ratio_c}; set actor.clip_ratio_c above 1 (3.0 is usual)")
    return config.clip_ratio_c

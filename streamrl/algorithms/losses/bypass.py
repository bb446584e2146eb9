"""The loss of bypass mode: the engine's log-probs stand for the old ones, no proximal policy is computed (``old_log_probs`` holds mu).

    ppo_clip    vanilla with rho = pi / mu: the clipped ratio is the importance weight, so none is applied
    reinforce   -w pi A, w from lr = pi - mu as in the correction (detached; truncated or zeroed by its threshold)

Rejection rules compare pi and mu too, so they act here, row by row and token by token. Tokens they reject stay in the global denominators, which
are counted before the forward pass: the caller that wants them out divides the gradient by (tokens - ``rejected_tokens``) / tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from streamrl.algorithms.corrections import accepted, importance_weights
from streamrl.algorithms.losses.gpg import gpg
from streamrl.algorithms.losses.registry import LOSSES
from streamrl.algorithms.losses.tokens import as_mask
from streamrl.algorithms.losses.vanilla import vanilla
from streamrl.algorithms.masks import masked
from streamrl.config.training import ActorConfig, RolloutCorrection


@LOSSES.register("bypass_mode")
def bypass_mode(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
    correction: RolloutCorrection | None = None,
    **aggregation: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``correction`` is the section (None: ppo_clip without rejection). Weights of an earlier stage are not used: this loss makes its own."""
    correction = correction or RolloutCorrection(rollout_is=None, bypass_mode=True)
    mask = as_mask(loss_mask, old_log_probs=old_log_probs, log_probs=log_probs, advantages=advantages)
    log_ratio = masked(log_probs - old_log_probs, mask).detach()
    accept = accepted(log_ratio, mask, correction)
    kept = mask if accept is None else mask & accept
    if correction.loss_type == "reinforce":
        weights = importance_weights(log_ratio, mask, correction)
        scalar, metrics = gpg(old_log_probs, log_probs, advantages, kept, config=config, rollout_is_weights=weights, **aggregation)
    else:
        scalar, metrics = vanilla(old_log_probs, log_probs, advantages, kept, config=config, **aggregation)
    return scalar, metrics | {"rejected_tokens": metrics["rejected_tokens"] + (mask & ~kept).sum()}


bypass_mode.batch_dependent, bypass_mode.select = False, None  # type: ignore[attr-defined]

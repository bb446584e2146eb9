"""The dict of policy losses, and how their metrics combine; apart from the package so that a loss's file can register itself. Losses of user code
are checked when they are looked up (their parameters) and at every call (what they return): that is the trainer's gradient."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from streamrl.algorithms.registry import Registry
from streamrl.config.losses import POLICY_LOSSES

PolicyLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
LOSSES: Registry[PolicyLoss] = Registry("policy loss (actor.policy_loss.loss_mode)")
MAX_METRICS = frozenset({"ratio_max"})  # combine by maximum; every other loss metric is a share of the global mean, or a count, and adds up

KEYWORDS = ("loss_agg_mode", "config", "rollout_is_weights", "dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor")


def get(name: str) -> PolicyLoss:
    """A loss by its name, or by ``module.path:name``. One of user code comes with the checks of ``checked``."""
    function = LOSSES.get(name)
    return function if name in POLICY_LOSSES else checked(name, function)


def checked(name: str, function: PolicyLoss) -> PolicyLoss:
    """The loss held to the contract: it takes every keyword, and returns a scalar that depends on ``log_probs``, and numbers as metrics.

    ``row_weights`` it may leave out, as long as no session has several trained rows.
    """
    parameters = inspect.signature(function).parameters.values()
    takes = {parameter.name for parameter in parameters if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)}
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    missing = [keyword for keyword in KEYWORDS if keyword not in takes]
    if missing and not takes_all:
        raise ValueError(f"a policy loss takes the keywords {', '.join(KEYWORDS)}, got {name!r} without {', '.join(missing)}; add them, or **kwargs")

    @functools.wraps(function)
    def loss(old_log_probs: Tensor, log_probs: Tensor, advantages: Tensor, loss_mask: Tensor, **keywords: Any) -> tuple[Tensor, dict[str, Tensor]]:
        if not takes_all and "row_weights" not in takes:
            _refuse_weights(name, keywords.pop("row_weights", None), loss_mask)
        result = function(old_log_probs, log_probs, advantages, loss_mask, **keywords)
        if not (isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[0], Tensor) and isinstance(result[1], Mapping)):
            raise ValueError(f"a policy loss returns (scalar tensor, metrics), got {type(result).__name__} from {name!r}; return both")
        scalar, metrics = result
        if scalar.dim():
            shape = tuple(scalar.shape)
            raise ValueError(f"a policy loss returns one number, got a tensor {shape} from {name!r}; aggregate it, as streamrl.algorithms.losses.agg_loss does")
        if log_probs.requires_grad and not scalar.requires_grad:
            raise ValueError(f"a policy loss depends on log_probs, got one without a gradient from {name!r}; do not detach log_probs everywhere")
        return scalar, {key: _number(name, key, value) for key, value in metrics.items()}

    return loss


def _refuse_weights(name: str, weights_B: Tensor | None, mask_BT: Tensor) -> None:
    if weights_B is not None and ((weights_B != 1) & mask_BT.bool().any(dim=1).to(weights_B.device)).any():
        rule = "a session of several rows counts once in a mean over sessions, by row_weights"
        raise ValueError(f"{rule}, got {name!r}, which takes none; add row_weights to it, or set actor.loss_agg_mode=token-mean")


def _number(name: str, key: str, value: Any) -> Tensor:
    """A metric as a tensor; it may be a plain number."""
    if not isinstance(value, Tensor | int | float) or (isinstance(value, Tensor) and value.numel() != 1):
        said = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"a metric of a policy loss is one number, got {key} = {said} from {name!r}; reduce it")
    return value.detach().reshape(()) if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)

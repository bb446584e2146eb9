"""The dict of advantage estimators; apart from the package so that an estimator's file can register itself. Estimators of user code are checked
at every call: what they return is the trainer's gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from streamrl.algorithms.registry import Registry
from streamrl.config.estimators import ESTIMATORS as KNOWN

Estimator = Callable[..., tuple[Tensor, Tensor]]
ESTIMATORS: Registry[Estimator] = Registry("advantage estimator (algorithm.adv_estimator)")


def get(name: str) -> Estimator:
    """An estimator by its name, or by ``module.path:name``. One of user code comes with the checks of ``checked``."""
    function = ESTIMATORS.get(name)
    return function if name in KNOWN else checked(name, function)


def checked(name: str, function: Estimator) -> Estimator:
    """The estimator with its result held to the contract: two tensors of the mask's shape, finite, 0 where the mask is off."""

    @functools.wraps(function)
    def estimate(token_level_rewards: Tensor, response_mask: Tensor, *, index: Any = None, config: Any = None, **columns: Any) -> tuple[Tensor, Tensor]:
        result = function(token_level_rewards, response_mask, index=index, config=config, **columns)
        if not (isinstance(result, tuple | list) and len(result) == 2 and all(isinstance(part, Tensor) for part in result)):
            raise ValueError(f"an estimator returns (advantages, returns), got {type(result).__name__} from {name!r}; return two tensors")
        for what, part in zip(("advantages", "returns"), result, strict=True):
            if part.shape != response_mask.shape:
                raise ValueError(f"{what} have the shape of the mask {tuple(response_mask.shape)}, got {tuple(part.shape)} from {name!r}; correct it")
            bad = torch.nonzero(~(torch.isfinite(part) | ~response_mask.bool()).all(dim=1)).flatten().tolist()
            if bad:
                rows = [f"{row} ({index[row]})" if index is not None else str(row) for row in bad[:3]]
                raise ValueError(f"{what} are finite, got NaN or Inf from {name!r} in {len(bad)} rows such as {', '.join(rows)}; correct the estimator")
        zero = torch.zeros((), device=response_mask.device)
        advantages, returns = (torch.where(response_mask.bool(), part.float(), zero) for part in result)
        return advantages, returns

    return estimate

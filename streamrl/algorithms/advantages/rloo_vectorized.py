"""``rloo`` under the name that elsewhere belongs to its fast form. A group of one gets 0 here, and S there; all else is the same."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from streamrl.algorithms.advantages.groups import group_count
from streamrl.algorithms.advantages.registry import ESTIMATORS
from streamrl.algorithms.advantages.rloo import leave_one_out
from streamrl.algorithms.advantages.samples import samples_of
from streamrl.config.training import AlgorithmConfig


@ESTIMATORS.register("rloo_vectorized")
def rloo_vectorized(
    token_level_rewards: Tensor, response_mask: Tensor, *, index: Any = None, config: AlgorithmConfig | None = None, **columns: Any
) -> tuple[Tensor, Tensor]:
    """Scores 1, 0, 0.5 of one group give 0.75, -0.75, 0."""
    samples = samples_of(token_level_rewards, response_mask, index, config, columns, groups=True)
    compared_S = group_count(samples)[samples.group_S] > 1
    advantages = samples.broadcast(np.where(compared_S, leave_one_out(samples), 0.0), response_mask)
    return advantages, advantages.clone()

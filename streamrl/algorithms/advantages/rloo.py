"""RLOO: a sample's score against the mean of the others in its group (Ahmadian et al. 2024, arXiv:2402.14740).

    A = S - mean of the other g - 1 scores = (S - mean(S)) * g / (g - 1)

A group of one keeps its S. Equal scores give exactly 0. Returns equal the advantages.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from streamrl.algorithms.advantages.groups import group_count, group_mean, over_baseline
from streamrl.algorithms.advantages.registry import ESTIMATORS
from streamrl.algorithms.advantages.samples import Samples, samples_of
from streamrl.config.training import AlgorithmConfig


@ESTIMATORS.register("rloo")
def rloo(
    token_level_rewards: Tensor, response_mask: Tensor, *, index: Any = None, config: AlgorithmConfig | None = None, **columns: Any
) -> tuple[Tensor, Tensor]:
    """Scores 1, 0, 0.5 of one group give 0.75, -0.75, 0."""
    samples = samples_of(token_level_rewards, response_mask, index, config, columns, groups=True)
    advantages = samples.broadcast(leave_one_out(samples), response_mask)
    return advantages, advantages.clone()


def leave_one_out(samples: Samples) -> np.ndarray:
    """S - mean of the group's other samples, for the accepted ones [S]; a group of one keeps S."""
    size_G = group_count(samples)
    factor_G = np.where(size_G > 1, size_G / np.maximum(size_G - 1, 1), 1.0)
    return over_baseline(samples, group_mean(samples)) * factor_G[samples.group_S]

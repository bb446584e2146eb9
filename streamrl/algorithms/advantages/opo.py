"""OPO: the baseline is the mean of the group's scores weighted by length, which is the one of least variance when gradients grow with length
(Hao et al. 2025, arXiv:2505.23585).

    A = S - sum(len_i S_i) / sum(len_i)     len = model tokens of the session

A group of one keeps its S. Equal scores give exactly 0. Returns equal the advantages.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from streamrl.algorithms.advantages.groups import group_sum, over_baseline
from streamrl.algorithms.advantages.registry import ESTIMATORS
from streamrl.algorithms.advantages.samples import samples_of
from streamrl.config.training import AlgorithmConfig


@ESTIMATORS.register("opo")
def opo(
    token_level_rewards: Tensor, response_mask: Tensor, *, index: Any = None, config: AlgorithmConfig | None = None, **columns: Any
) -> tuple[Tensor, Tensor]:
    """Scores 1, 0, 0.5 of lengths 3, 5, 2 have the baseline 0.4, which gives 0.6, -0.4, 0.1."""
    samples = samples_of(token_level_rewards, response_mask, index, config, columns, groups=True)
    length_B = response_mask.bool().sum(dim=1).cpu().numpy()
    length_S = np.bincount(samples.row_sample_B, weights=length_B, minlength=len(samples.score_S))
    baseline_G = group_sum(samples, length_S * samples.score_S) / np.maximum(group_sum(samples, length_S), 1)
    advantages = samples.broadcast(over_baseline(samples, baseline_G), response_mask)
    return advantages, advantages.clone()

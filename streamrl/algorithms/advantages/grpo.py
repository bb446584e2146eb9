"""GRPO: a sample's score against the mean of its group, in units of the group's standard deviation (Shao et al. 2024, arXiv:2402.03300).

    A = (S - mean(S)) / (std(S) + eps)     std is unbiased (n - 1), eps 1e-6

Without ``norm_adv_by_std_in_grpo`` A = S - mean(S) (Dr.GRPO: Liu et al. 2025, arXiv:2503.20783). A group of one has mean 0 and std 1, so
A = S / (1 + eps) or S. Equal scores give exactly 0. A rejected sample gets 0 and moves no sibling. Returns equal the advantages.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from streamrl.algorithms.advantages.groups import group_mean, group_std, over_baseline
from streamrl.algorithms.advantages.registry import ESTIMATORS
from streamrl.algorithms.advantages.samples import Samples, samples_of
from streamrl.config.training import AlgorithmConfig

EPSILON = 1e-6


@ESTIMATORS.register("grpo")
def grpo(
    token_level_rewards: Tensor, response_mask: Tensor, *, index: Any = None, config: AlgorithmConfig | None = None, epsilon: float = EPSILON, **columns: Any
) -> tuple[Tensor, Tensor]:
    """Scores 1, 0, 0.5 of one group give 0.999998, -0.999998, 0 (normed) or 0.5, -0.5, 0 on every token of the mask."""
    samples = samples_of(token_level_rewards, response_mask, index, config, columns, groups=True)
    advantages = samples.broadcast(group_relative(samples, config, epsilon), response_mask)
    return advantages, advantages.clone()


def group_relative(samples: Samples, config: AlgorithmConfig | None, epsilon: float = EPSILON) -> np.ndarray:
    """The advantage of each sample, float64 [S]; 0 for the rejected ones."""
    advantage_S = over_baseline(samples, group_mean(samples))
    return advantage_S / divisor(samples, config, epsilon)


def divisor(samples: Samples, config: AlgorithmConfig | None, epsilon: float = EPSILON) -> np.ndarray:
    """std + eps of each sample's group [S]; 1 without ``norm_adv_by_std_in_grpo``."""
    norm = True if config is None else config.norm_adv_by_std_in_grpo
    return (group_std(samples) + epsilon)[samples.group_S] if norm else np.ones(len(samples.group_S))

"""GRPO: a sample's score against the mean of its group, in units of the group's standard deviation.

    A = (S - mean(S)) / (std(S) + eps)     std is unbiased (n - 1), eps 1e-6; without ``norm_adv_by_std_in_grpo`` (Dr.GRPO): A = S - mean(S)

over the accepted samples of the group. A group of one has mean 0 and std 1, so A = S / (1 + eps) or S. A group whose scores are all equal
gives exactly 0: rounding of a mean is not a signal. A rejected sample gets 0 and moves no sibling. Returns equal the advantages.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from streamrl.algorithms.advantages.registry import ESTIMATORS
from streamrl.algorithms.advantages.samples import Samples, collect_samples
from streamrl.config.training import AlgorithmConfig

EPSILON = 1e-6


@ESTIMATORS.register("grpo")
def grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    index: Any = None,
    config: AlgorithmConfig | None = None,
    session_ids: Any = None,
    output_index: Any = None,
    accept: Tensor | None = None,
    epsilon: float = EPSILON,
    **columns: Any,
) -> tuple[Tensor, Tensor]:
    """Scores 1, 0, 0.5 of one group give 0.999998, -0.999998, 0 (normed) or 0.5, -0.5, 0 on every token of the mask."""
    if index is None:
        raise ValueError("grpo compares the samples of a prompt, got no index; pass the uid of every row")
    norm = True if config is None else config.norm_adv_by_std_in_grpo
    samples = collect_samples(token_level_rewards, response_mask, index, session_ids=session_ids, output_index=output_index, accept=accept)
    advantages = samples.broadcast(group_relative(samples, norm=norm, epsilon=epsilon), response_mask)
    return advantages, advantages.clone()


def group_relative(samples: Samples, *, norm: bool, epsilon: float = EPSILON) -> np.ndarray:
    """The advantage of each sample, float64 [S]; 0 for the rejected ones."""
    scores, group, kept = samples.score_S, samples.group_S, samples.accepted_S
    advantage = np.zeros_like(scores)
    size_G = samples.group_sizes()
    total_G = np.bincount(group[kept], weights=scores[kept], minlength=len(size_G))
    mean_G = np.where(size_G > 1, total_G / np.maximum(size_G, 1), 0.0)
    centred = scores[kept] - mean_G[group[kept]]
    if norm:
        squares_G = np.bincount(group[kept], weights=centred**2, minlength=len(size_G))
        std_G = np.where(size_G > 1, np.sqrt(squares_G / np.maximum(size_G - 1, 1)), 1.0)
        centred = centred / (std_G[group[kept]] + epsilon)
    equal_G = _all_equal(scores[kept], group[kept], len(size_G)) & (size_G > 1)
    advantage[kept] = np.where(equal_G[group[kept]], 0.0, centred)
    return advantage


def _all_equal(scores: np.ndarray, group: np.ndarray, num_groups: int) -> np.ndarray:
    lowest, highest = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(lowest, group, scores)
    np.maximum.at(highest, group, scores)
    return lowest == highest

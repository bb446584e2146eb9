"""Statistics of groups, over the counted samples: each a plain float64 number per group, in any row order.

Shapes: S samples, G groups. What a group of one means is the estimators' business: the mean of one score here is that score.
"""

from __future__ import annotations

import numpy as np

from streamrl.algorithms.advantages.samples import Samples


def group_sum(samples: Samples, value_S: np.ndarray) -> np.ndarray:
    """Sum of a value over the counted samples of each group [G]."""
    counted = samples.counted_S
    return np.bincount(samples.group_S[counted], weights=value_S[counted], minlength=len(samples.group_uids))


def group_count(samples: Samples) -> np.ndarray:
    return group_sum(samples, np.ones(len(samples.group_S)))


def group_mean(samples: Samples) -> np.ndarray:
    """Scores 2, 4 and, in another group, 0.7 give 3 and 0.7; a group without a counted sample gives 0."""
    return group_sum(samples, samples.score_S) / np.maximum(group_count(samples), 1)


def group_std(samples: Samples) -> np.ndarray:
    """Unbiased (n - 1); 1 for fewer than two samples."""
    size_G, counted = group_count(samples), samples.counted_S
    squares_S = np.zeros(len(counted))
    squares_S[counted] = (samples.score_S[counted] - group_mean(samples)[samples.group_S[counted]]) ** 2
    return np.where(size_G > 1, np.sqrt(group_sum(samples, squares_S) / np.maximum(size_G - 1, 1)), 1.0)


def equal_groups(samples: Samples) -> np.ndarray:
    """Groups of at least two samples whose scores are all exactly equal."""
    lowest, highest = np.full(len(samples.group_uids), np.inf), np.full(len(samples.group_uids), -np.inf)
    counted = samples.counted_S
    np.minimum.at(lowest, samples.group_S[counted], samples.score_S[counted])
    np.maximum.at(highest, samples.group_S[counted], samples.score_S[counted])
    return (lowest == highest) & (group_count(samples) > 1)


def over_baseline(samples: Samples, baseline_G: np.ndarray) -> np.ndarray:
    """S - baseline of each accepted sample [S]; 0 for the others.

    A group of one has no baseline, its sample keeps S; in a group of equal scores every sample gets exactly 0: rounding of a mean is no signal.
    """
    advantage_S, kept = np.zeros(len(samples.score_S)), samples.accepted_S
    baseline_G = np.where(group_count(samples) > 1, baseline_G, 0.0)
    group = samples.group_S[kept]
    advantage_S[kept] = np.where(equal_groups(samples)[group], 0.0, samples.score_S[kept] - baseline_G[group])
    return advantage_S

"""GRPO for pass@k: only the best sample of a group is credited, with its lead over the second (Tang et al. 2025, arXiv:2503.19595).

    A = (S_max - S_second) / (std(S) + eps) for the best sample, 0 for all others; without ``norm_adv_by_std_in_grpo`` the lead itself

A tie for the best gives 0. A prompt sampled once has no second: ValueError. A group that rejection has reduced to one accepted sample gives 0,
since the caller drops it. Returns equal the advantages.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from streamrl.algorithms.advantages.grpo import EPSILON, divisor
from streamrl.algorithms.advantages.registry import ESTIMATORS
from streamrl.algorithms.advantages.samples import Samples, samples_of
from streamrl.config.training import AlgorithmConfig


@ESTIMATORS.register("grpo_passk")
def grpo_passk(
    token_level_rewards: Tensor, response_mask: Tensor, *, index: Any = None, config: AlgorithmConfig | None = None, epsilon: float = EPSILON, **columns: Any
) -> tuple[Tensor, Tensor]:
    """Scores 1, 0, 0.5 of one group give 0.5 / 0.500001, 0, 0 (normed) or 0.5, 0, 0."""
    samples = samples_of(token_level_rewards, response_mask, index, config, columns, groups=True)
    advantage_S = lead_of_best(samples) / divisor(samples, config, epsilon)
    advantages = samples.broadcast(np.where(samples.accepted_S, advantage_S, 0.0), response_mask)
    return advantages, advantages.clone()


def lead_of_best(samples: Samples) -> np.ndarray:
    """Of each group's best counted sample its lead over the second, 0 for the others [S]."""
    alone = np.flatnonzero(np.bincount(samples.group_S, minlength=len(samples.group_uids)) == 1)
    if len(alone):
        raise ValueError(f"grpo_passk needs at least two samples of a prompt, got one of {[samples.group_uids[g] for g in alone[:3]]}; raise rollout.n")
    lead_S = np.zeros(len(samples.score_S))
    chosen = np.flatnonzero(samples.counted_S)
    ranked = chosen[np.lexsort((samples.score_S[chosen], samples.group_S[chosen]))]  # by group, ascending scores
    group = samples.group_S[ranked]
    second, best = ranked[:-1], ranked[1:]
    ends = (group[1:] == group[:-1]) & np.append(group[1:-1] != group[2:], True)[: len(best)]  # the last two of a group
    lead_S[best[ends]] = samples.score_S[best[ends]] - samples.score_S[second[ends]]
    return lead_S

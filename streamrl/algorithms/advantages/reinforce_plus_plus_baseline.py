"""REINFORCE++ with a baseline: the group mean is taken off, the batch sets the scale (Hu et al. 2025, arXiv:2501.03262).

    A = whiten(S - mean(S)) * m     mean over the group, whitened over the accepted tokens of the batch

A group of one keeps its S before whitening. Returns equal the advantages.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from streamrl.algorithms.advantages.groups import group_mean, over_baseline
from streamrl.algorithms.advantages.registry import ESTIMATORS
from streamrl.algorithms.advantages.samples import samples_of
from streamrl.algorithms.whitening import whiten
from streamrl.config.training import AlgorithmConfig


@ESTIMATORS.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(
    token_level_rewards: Tensor, response_mask: Tensor, *, index: Any = None, config: AlgorithmConfig | None = None, **columns: Any
) -> tuple[Tensor, Tensor]:
    """Scores 1, 0 of one group, one token each, are 0.5, -0.5 before whitening and 0.707107, -0.707107 after."""
    samples = samples_of(token_level_rewards, response_mask, index, config, columns, groups=True)
    centred = samples.broadcast(over_baseline(samples, group_mean(samples)), response_mask)
    advantages = whiten(centred, samples.tokens(response_mask, samples.accepted_S))
    return advantages, advantages.clone()

"""GPG: the centred score, scaled up by how few samples of the batch earned anything (Chu et al. 2025, arXiv:2504.02546).

    A = alpha (S - mean(S)) / f_norm     alpha = N / max(samples with a score other than 0, 1), over the batch

A group of one has no baseline: alpha S / f_norm. Equal scores give exactly 0. Returns equal the advantages.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from streamrl.algorithms.advantages.groups import group_mean, over_baseline
from streamrl.algorithms.advantages.registry import ESTIMATORS
from streamrl.algorithms.advantages.samples import samples_of
from streamrl.config.training import AlgorithmConfig


@ESTIMATORS.register("gpg")
def gpg(
    token_level_rewards: Tensor, response_mask: Tensor, *, index: Any = None, config: AlgorithmConfig | None = None, **columns: Any
) -> tuple[Tensor, Tensor]:
    """Scores 1, 0, 0.5 of one group: alpha is 3 / 2, which gives 0.75, -0.75, 0."""
    samples = samples_of(token_level_rewards, response_mask, index, config, columns, groups=True)
    scores = samples.score_S[samples.counted_S]
    alpha = len(scores) / max(int(np.count_nonzero(scores)), 1)
    f_norm = 1.0 if config is None else config.f_norm
    advantages = samples.broadcast(over_baseline(samples, group_mean(samples)) * (alpha / f_norm), response_mask)
    return advantages, advantages.clone()

"""Optimal token baseline: at each position the baseline of least variance, weighted by how much gradient the trajectories have gathered there
(Li et al. 2026, The Optimal Token Baseline, PMLR 306).

    G_t = sum of r from t on      w_t = 1 - 2 pi_t + sum pi^2, times the squared importance weight when there is one      W_t = w_1 + ... + w_t
    B_t = sum_i G W m / (sum_i W m + 1e-8) over the trajectories i of the group      A_t = (G_t - B_t) m

A trajectory is a session; several outputs are joined in index order. B is 0 for a group of one, and on what the single longest trajectory of a
group has beyond the second longest: nothing there is compared with anything. Returns are G.
Positions include observations here, while lengths count model tokens: inserting an observation moves the baseline. That is the estimator's
definition for single answers; ``tir_optimal_token_baseline`` is the one for answers with observations.

Shapes: N trajectories, L positions of the longest, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamrl.algorithms.advantages.placement import session_rewards
from streamrl.algorithms.advantages.registry import ESTIMATORS
from streamrl.algorithms.advantages.samples import Samples, need, samples_of
from streamrl.algorithms.advantages.streams import Streams, discounted_sum
from streamrl.algorithms.masks import masked
from streamrl.config.training import AlgorithmConfig

EPSILON = 1e-8


@ESTIMATORS.register("optimal_token_baseline")
def optimal_token_baseline(
    token_level_rewards: Tensor, response_mask: Tensor, *, index: Any = None, config: AlgorithmConfig | None = None, **columns: Any
) -> tuple[Tensor, Tensor]:
    """Two answers of one token, scores 1 and 0, w 1 and 3: B = 1 / 4, advantages .75 and -.25."""
    samples = samples_of(token_level_rewards, response_mask, index, config, columns, groups=True)
    places = samples.tokens(up_to_last_token(response_mask), samples.counted_S)
    return token_baseline(token_level_rewards, response_mask, samples, Streams.of(places, samples, chain=True), columns, "optimal_token_baseline")


def token_baseline(rewards_BT: Tensor, mask_BT: Tensor, samples: Samples, streams: Streams, columns: Mapping[str, Any], name: str) -> tuple[Tensor, Tensor]:
    """Advantages and returns over the positions of ``streams``."""
    rewards = session_rewards(rewards_BT, mask_BT, samples, columns.get("token_level_scores"), chain=True)
    on_NL = streams.pack(mask_BT.bool())
    returns_NL = discounted_sum(streams.pack(masked(rewards, mask_BT)), 1.0)
    weight_NL = streams.pack(gradient_energy(samples.tokens(mask_BT, samples.counted_S), columns, name)).cumsum(dim=1)
    weight_NL *= on_NL
    group_N = torch.as_tensor(samples.group_S[streams.sample_N], device=mask_BT.device)
    shape = (len(samples.group_uids), weight_NL.shape[1])
    energy_GL = weight_NL.new_zeros(shape).index_add_(0, group_N, weight_NL)
    earned_GL = weight_NL.new_zeros(shape).index_add_(0, group_N, returns_NL * weight_NL)
    baseline_NL = (earned_GL / (energy_GL + EPSILON))[group_N]
    places_L = torch.arange(shape[1], device=mask_BT.device)
    baseline_NL.masked_fill_(places_L >= torch.as_tensor(compared_lengths(on_NL, samples, streams), device=mask_BT.device)[:, None], 0.0)
    accepted = samples.tokens(mask_BT, samples.accepted_S)
    return masked(streams.unpack(returns_NL - baseline_NL), accepted), masked(streams.unpack(returns_NL), accepted)


def gradient_energy(tokens_BT: Tensor, columns: Mapping[str, Any], name: str) -> Tensor:
    """w: the squared norm of a token's gradient at the logits, times the squared importance weight; 0 elsewhere."""
    probability, squares = need(columns, "old_log_probs", name, tokens_BT).double().exp(), need(columns, "sum_pi_squared", name, tokens_BT)
    energy = 1 - 2 * probability + squares
    if columns.get("rollout_is_weights") is not None:
        energy *= need(columns, "rollout_is_weights", name, tokens_BT).double().square()
    return masked(energy, tokens_BT)


def compared_lengths(on_NL: Tensor, samples: Samples, streams: Streams) -> np.ndarray:
    """How many positions of each trajectory have a baseline [N]: all; none in a group of one; the single longest's as far as the second longest."""
    length_N, chosen = on_NL.sum(dim=1).cpu().numpy(), np.flatnonzero(samples.counted_S[streams.sample_N])
    compared_N = np.full(len(length_N), float(on_NL.shape[1]))
    group_N = samples.group_S[streams.sample_N]
    ranked = chosen[np.lexsort((length_N[chosen], group_N[chosen]))]  # by group, ascending lengths
    for group in np.split(ranked, np.flatnonzero(np.diff(group_N[ranked])) + 1):
        if len(group) == 1:
            compared_N[group] = 0
        elif len(group) and length_N[group[-1]] > length_N[group[-2]]:
            compared_N[group[-1]] = length_N[group[-2]]
    return compared_N


def up_to_last_token(mask_BT: Tensor) -> Tensor:
    """Every position up to a row's last model token: observations between turns, but no padding."""
    return mask_BT.bool().flip(1).cummax(dim=1).values.flip(1) if mask_BT.shape[1] else mask_BT.bool()

"""GDPO: each reward component is normalised in its group before they are added, so that none drowns the others (arXiv:2601.05242).

    A = whiten(sum_k weight_k * grpo(S_k)) * m     over the components k of ``gdpo_reward_keys``, whitened over the tokens of the batch

A component is a column [B] of its name, or that key of the rows' ``reward_extra_info``; of a session the last output counts. A sample with a
component that is not finite is rejected, like one with such a score. Returns equal the advantages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from streamrl.algorithms.advantages.grpo import EPSILON, group_relative
from streamrl.algorithms.advantages.registry import ESTIMATORS
from streamrl.algorithms.advantages.samples import samples_of
from streamrl.algorithms.whitening import whiten
from streamrl.config.training import AlgorithmConfig


@ESTIMATORS.register("gdpo")
def gdpo(
    token_level_rewards: Tensor, response_mask: Tensor, *, index: Any = None, config: AlgorithmConfig | None = None, epsilon: float = EPSILON, **columns: Any
) -> tuple[Tensor, Tensor]:
    """Components [1, 0] and [0, 2] of a group of two normalise to +-0.707 each, and cancel with equal weights."""
    if config is None or not config.gdpo_reward_keys:
        raise ValueError("gdpo adds the components in algorithm.gdpo_reward_keys, got none; name the keys that the score function returns")
    samples = samples_of(token_level_rewards, response_mask, index, config, columns, groups=True)
    components = {key: component(columns, key, len(response_mask))[samples.last_row_S] for key in config.gdpo_reward_keys}
    finite_S = np.isfinite(np.stack(list(components.values()))).all(axis=0)
    samples = replace(samples, accepted_S=samples.accepted_S & finite_S, counted_S=samples.counted_S & finite_S)
    total_S = np.zeros(len(finite_S))
    for weight, score_S in zip(config.gdpo_reward_weights or [1.0] * len(components), components.values(), strict=True):
        total_S += weight * group_relative(replace(samples, score_S=score_S), config, epsilon)
    advantages = whiten(samples.broadcast(total_S, response_mask), samples.tokens(response_mask, samples.accepted_S))
    return advantages, advantages.clone()


def component(columns: Mapping[str, Any], key: str, num_rows: int) -> np.ndarray:
    """One reward component of every row, float64 [B]; a missing or null value is NaN when other rows have one."""
    extra = columns.get("reward_extra_info")
    if key in columns:
        values = list(columns[key])
    else:
        values = [None if row is None else row.get(key) for row in (extra if extra is not None else [])]
    if len(values) != num_rows or (num_rows and all(value is None for value in values)):
        known = sorted({name for row in (extra if extra is not None else []) for name in (row or {})})
        raise ValueError(f"gdpo reads the reward component {key!r} of every row, got components {known}; return it from the score function or correct the key")
    return np.array([np.nan if value is None else float(value) for value in values], np.float64)

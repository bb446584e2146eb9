"""Batches for the estimators: rows with everything any of them reads, and what may be done to a batch without changing an advantage.

Shapes: B rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamrl.algorithms import advantages
from streamrl.config.estimators import ESTIMATORS
from streamrl.config.training import AlgorithmConfig

PER_TOKEN = ("token_level_rewards", "response_mask", "values", "old_log_probs", "sum_pi_squared", "rollout_is_weights")
Batch = dict[str, Any]


def config_of(name: str, **changes: Any) -> AlgorithmConfig:
    """The algorithm section that runs ``name``, with discounts that show."""
    keys = ("correct", "short") if name == "gdpo" else None
    return AlgorithmConfig(**{"adv_estimator": name, "gamma": 0.9, "lam": 0.8, "gdpo_reward_keys": keys} | changes)


def batch_of(masks: Sequence[Sequence[int]], scores: Sequence[float], uids: Sequence[str], seed: int = 0) -> Batch:
    """Rows of these masks, the score on the last model token; sessions are numbered within their prompt. Other columns are drawn."""
    width = max((len(mask) for mask in masks), default=0)
    mask = torch.zeros(len(masks), width, dtype=torch.long)
    for row, bits in enumerate(masks):
        mask[row, : len(bits)] = torch.tensor(bits, dtype=torch.long)
    dice = torch.Generator().manual_seed(seed)
    values, old, squares, weights = (torch.rand(mask.shape, generator=dice) for _ in range(4))
    return {
        "token_level_rewards": advantages.outcome_rewards(torch.tensor(scores, dtype=torch.float32), mask),
        "response_mask": mask,
        "index": np.array(uids),
        "session_ids": np.array([list(uids[:row]).count(uid) for row, uid in enumerate(uids)], np.int64),
        "output_index": np.zeros(len(uids), np.int64),
        "values": values * mask,
        "old_log_probs": -old * mask,
        "sum_pi_squared": squares * mask,
        "rollout_is_weights": (0.5 + weights) * mask,
        "reward_baselines": torch.tensor([len(uid) * 0.25 for uid in uids]),
        "correct": np.array(scores, np.float64),
        "short": np.array([-float(sum(bits)) for bits in masks]),
    }


def estimate(name: str, batch: Batch, **changes: Any) -> tuple[Tensor, Tensor]:
    return advantages.get(name)(**batch, config=config_of(name, **changes))


def rows(batch: Batch, order: Sequence[int]) -> Batch:
    """The batch with these rows, in this order."""
    return {name: column[np.array(order, np.int64)] for name, column in batch.items()}


def spread(batch: Batch, places: Tensor, width: int, filler: float = 0.0) -> Batch:
    """Every token of every row moved to ``places[b, t]`` of ``width``; what stands between are observations with ``filler`` in every column."""

    def moved(name: str, column: Tensor) -> Tensor:
        empty = torch.full((len(column), width), 0.0 if name == "response_mask" else filler).to(column.dtype)
        return empty.scatter_(1, places, column)

    return {name: moved(name, column) if name in PER_TOKEN else column for name, column in batch.items()}


ALL = sorted(ESTIMATORS)
GROUP = [name for name in ALL if ESTIMATORS[name].group]
TOKEN = [name for name in ALL if "multi_output" in ESTIMATORS[name].options]
WHITENED = {"gae", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}

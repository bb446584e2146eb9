"""Metrics of the advantage stage, over the whole batch: names are verl's where it has one. Decides nothing.

Shapes: B rows, R response tokens, S samples, G groups.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from streamrl.algorithms.advantages.samples import Samples, row_scores
from streamrl.algorithms.diagnostics import entropy_diagnostics, rejected_share, zero_variance_share
from streamrl.protocol.meta import KVBatchMeta


def reward_metrics(samples: Samples, rewards_BR: Tensor, advantages_BR: Tensor, returns_BR: Tensor, kept_BR: Tensor) -> dict[str, float]:
    """Scores and rewards per accepted sample (before and after a KL penalty), advantages and returns per trained token, groups without a signal."""
    accepted, sizes = samples.accepted_S, samples.group_sizes()
    rewards_S = row_scores(rewards_BR, torch.ones_like(rewards_BR))[samples.last_row_S]
    metrics = spread("critic/score", samples.score_S[accepted]) | spread("critic/rewards", rewards_S[accepted])
    metrics |= spread("critic/advantages", advantages_BR[kept_BR].numpy()) | spread("critic/returns", returns_BR[kept_BR].numpy())
    share = zero_variance_share(samples.score_S[accepted], samples.group_S[accepted].tolist())
    return metrics | {
        "training/groups": float(len(sizes)),
        "training/zero_variance_groups": float(round(share * int((sizes > 1).sum()))),
        "training/zero_variance_share": share,
        "training/single_sample_groups_ratio": float((sizes == 1).mean()),
        "training/rejected_samples": float((~accepted).sum()),
    }


class EnvMetrics(NamedTuple):
    """Of the groups and accepted samples of one environment in a batch. ``zero_variance_ratio`` of the groups with two or more samples; NaN without any."""

    reward_mean: float
    reward_std: float
    singleton_ratio: float
    zero_variance_ratio: float


def env_metrics(samples: Samples, envs: list[str]) -> dict[str, EnvMetrics]:
    """By environment; one whose samples were all rejected is left out. ``envs``: of each row."""
    env_S = np.array([envs[row] for row in samples.last_row_S])
    found = {}
    for env in dict.fromkeys(envs):
        chosen_S = (env_S == env) & samples.accepted_S
        scores, groups = samples.score_S[chosen_S], samples.group_S[chosen_S]
        if not len(scores):
            continue
        sizes = np.unique(groups, return_counts=True)[1]
        flat = zero_variance_share(scores, groups.tolist()) if (sizes > 1).any() else math.nan
        found[env] = EnvMetrics(float(scores.mean()), float(scores.std()), float((sizes == 1).mean()), flat)
    return found


def value_metrics(values_BR: Tensor | None, returns_BR: Tensor, kept_BR: Tensor) -> dict[str, float]:
    """The critic's values per trained token, and the share of the returns' variance that they explain: 1 is perfect, 0 no better than a constant."""
    if values_BR is None or int(kept_BR.sum()) < 2:
        return {}
    values, returns = values_BR[kept_BR].double(), returns_BR[kept_BR].double()
    return spread("critic/values", values.numpy()) | {"critic/vf_explained_var": float(1 - (returns - values).var() / (returns.var() + 1e-5))}


def token_metrics(response_mask_BR: Tensor, kept_BR: Tensor, entropy_BR: Tensor | None) -> dict[str, float]:
    """The share of model tokens without a loss; how the entropy spreads (its mean is the scoring stage's)."""
    metrics = {"training/rejected_token_share": rejected_share(response_mask_BR, kept_BR)}
    if entropy_BR is not None:
        found = entropy_diagnostics(entropy_BR, response_mask_BR)
        metrics |= {f"actor/{name}": found[name] for name in ("entropy_p10", "entropy_near_zero")}
    return metrics


def length_metrics(response_mask_BR: Tensor) -> dict[str, float]:
    """Model tokens per row; the lengths with observations come from the tags."""
    return spread("training/model_tokens", response_mask_BR.bool().sum(1).double().numpy())


def tag_metrics(batch: KVBatchMeta) -> dict[str, float]:
    """Lengths as the rollout wrote them."""
    metrics: dict[str, float] = {}
    for name, tag in (("response_length", "response_len"), ("prompt_length", "prompt_len")):
        metrics |= spread(name, np.array([row[tag] for row in batch.tags if tag in row], dtype=float))
    return metrics


def session_metrics(num_turns: list[int], extras: list[dict[str, Any]]) -> dict[str, float]:
    """Turns per row, and every number that the scorers returned beside the score, under ``reward_extra/``; a row without one is left out."""
    metrics = spread("num_turns", np.array(num_turns, dtype=float))
    names = {name for extra in extras for name, value in extra.items() if isinstance(value, int | float)} - {"score", "acc"}
    for name in sorted(names):
        metrics |= spread(f"reward_extra/{name}", np.array([extra[name] for extra in extras if isinstance(extra.get(name), int | float)], dtype=float))
    return metrics


def spread(name: str, values: np.ndarray) -> dict[str, float]:
    """Mean, max and min; nothing for an empty set."""
    if not len(values):
        return {}
    return {f"{name}/mean": float(values.mean()), f"{name}/max": float(values.max()), f"{name}/min": float(values.min())}

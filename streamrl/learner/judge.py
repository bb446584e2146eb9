"""The advantage stage, on the CPU of rank 0: which rows count, what their rewards mean inside their group, how far their weights are off.

``loss_mask`` becomes the final effective mask here and nowhere else: response_mask, minus samples without a finite reward, minus what the
correction rejects, minus groups with fewer than ``algorithm.min_group_size`` accepted samples. Reads response-level columns only.

Shapes: B rows, R response tokens of the longest response, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from streamrl.algorithms import advantages
from streamrl.algorithms.advantages.samples import Samples, collect_samples
from streamrl.algorithms.corrections import rollout_correction
from streamrl.algorithms.diagnostics import rollout_probs_diff
from streamrl.config.training import AlgorithmConfig
from streamrl.errors import ProtocolError
from streamrl.protocol.keys import TrajectoryKey
from streamrl.protocol.learn import StageReport


@dataclass(frozen=True)
class Judgement:
    """The written columns, each [B, R]; ``rollout_is_weights`` None when the correction is off."""

    token_level_rewards: Tensor
    advantages: Tensor
    returns: Tensor
    loss_mask: Tensor
    rollout_is_weights: Tensor | None
    report: StageReport


def judge(
    keys: list[str],
    response_mask: Tensor,
    rewards: Tensor,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor | None,
    config: AlgorithmConfig,
) -> Judgement:
    """All tensors [B, R]. Scores 1, NaN, 0, 0.5 of one group give 0.999998, 0, -0.999998, 0; the second row's loss_mask is 0."""
    parsed = [TrajectoryKey.parse(key) for key in keys]
    columns = {"session_ids": [key.session_id for key in parsed], "output_index": [key.index for key in parsed]}
    uids = [key.uid for key in parsed]
    weights, accept = None, None
    metrics: dict[str, float] = {}
    if rollout_log_probs is not None:
        weights, accept, metrics = rollout_correction(old_log_probs, rollout_log_probs, response_mask, config.rollout_correction)
        metrics |= rollout_probs_diff(old_log_probs, rollout_log_probs, response_mask)
    samples = collect_samples(rewards, response_mask, uids, accept=accept, **columns)
    accepted_B = torch.as_tensor(samples.accepted_S[samples.row_sample_B])
    large_B = torch.as_tensor(_large_groups(samples, config, columns["session_ids"])[samples.group_S[samples.row_sample_B]])
    clean = torch.where(accepted_B[:, None], rewards, torch.zeros(()))
    raw_advantages, raw_returns = advantages.get(config.adv_estimator)(
        clean, response_mask, index=uids, config=config, accept=accepted_B if accept is None else accept.bool() & accepted_B[:, None], **columns
    )
    kept = response_mask.bool() & (accepted_B & large_B)[:, None]
    if accept is not None:
        kept &= accept.bool()
    zero = torch.zeros(())
    final, returns = torch.where(kept, raw_advantages, zero), torch.where(kept, raw_returns, zero)
    _check_finite(final, keys)
    metrics |= reward_metrics(samples, final, returns, kept) | length_metrics(response_mask)
    rejected = _rejections(keys, samples, large_B.tolist())
    return Judgement(clean, final, returns, kept.long(), weights, StageReport(metrics, rejected))


def _large_groups(samples: Samples, config: AlgorithmConfig, session_ids: list[int]) -> np.ndarray:
    """Groups with enough accepted samples. The resolved configuration sets the limit; without it min(2, n), n as seen in the batch."""
    limit = config.min_group_size or min(2, 1 + max(session_ids))
    return samples.group_sizes() >= limit


def _rejections(keys: list[str], samples: Samples, large: list[bool]) -> list[tuple[str, str]]:
    """Rows that are not trained, each with its rule; every row of a small group names ``group_too_small``."""
    rejected = [(key, "group_too_small") for key, is_large in zip(keys, large, strict=True) if not is_large]
    for key, sample in zip(keys, samples.row_sample_B, strict=True):
        if not samples.accepted_S[sample]:
            rejected.append((key, "rejected_tokens" if np.isfinite(samples.score_S[sample]) else "non_finite_reward"))
    return rejected


def _check_finite(advantages_BR: Tensor, keys: list[str]) -> None:
    bad = [keys[i] for i in torch.nonzero(~torch.isfinite(advantages_BR).all(1)).flatten().tolist()]
    if bad:
        raise ProtocolError(f"advantages of accepted rows are finite, got NaN or Inf in {len(bad)} rows such as {bad[:3]}; check the estimator")


def reward_metrics(samples: Samples, advantages_BR: Tensor, returns_BR: Tensor, kept_BR: Tensor) -> dict[str, float]:
    """Scores per accepted sample, advantages and returns per trained token, and how many groups carry no signal."""
    scores = samples.score_S[samples.accepted_S]
    sizes = samples.group_sizes()
    metrics = spread("critic/score", scores) | spread("critic/rewards", scores)
    metrics |= spread("critic/advantages", advantages_BR[kept_BR].numpy()) | spread("critic/returns", returns_BR[kept_BR].numpy())
    flat = [np.ptp(samples.score_S[(samples.group_S == g) & samples.accepted_S]) == 0 for g in np.flatnonzero(sizes > 1)]
    return metrics | {
        "training/groups": float(len(sizes)),
        "training/zero_variance_groups": float(sum(flat)),
        "training/single_sample_groups_ratio": float((sizes == 1).mean()),
        "training/rejected_samples": float((~samples.accepted_S).sum()),
    }


def length_metrics(response_mask_BR: Tensor) -> dict[str, float]:
    """Model tokens per row; the lengths with observations come from the tags."""
    return spread("training/model_tokens", response_mask_BR.bool().sum(1).double().numpy())


def spread(name: str, values: np.ndarray) -> dict[str, float]:
    """Mean, max and min; nothing for an empty set."""
    if not len(values):
        return {}
    return {f"{name}/mean": float(values.mean()), f"{name}/max": float(values.max()), f"{name}/min": float(values.min())}

"""The advantage stage, on the CPU of rank 0: which rows count, what their rewards mean inside their group, how far their weights are off.

``loss_mask`` becomes the final effective mask here and nowhere else: response_mask, minus samples without a finite reward, minus what the
correction rejects, minus groups with fewer than ``algorithm.min_group_size`` accepted samples, which the estimator doesn't see. A column that is
not finite on model tokens is refused with the key of its row before anything is computed from it. Reads response-level columns only.

Shapes: B rows, R response tokens of the longest response, S samples, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamrl.algorithms import advantages
from streamrl.algorithms.advantages.gdpo import component
from streamrl.algorithms.advantages.samples import Samples, collect_samples
from streamrl.algorithms.corrections import rollout_correction
from streamrl.algorithms.diagnostics import log_prob_gap, rollout_probs_diff
from streamrl.algorithms.kl import kl_in_reward
from streamrl.algorithms.kl_control import KLController
from streamrl.algorithms.losses import session_weights
from streamrl.config.training import AlgorithmConfig
from streamrl.errors import ProtocolError
from streamrl.learner.judge_metrics import EnvMetrics, env_metrics, length_metrics, reward_metrics, token_metrics, value_metrics
from streamrl.protocol.keys import TrajectoryKey
from streamrl.protocol.learn import StageReport

_PER_TOKEN = ("ref_log_prob", "sum_pi_squared", "values", "entropy")  # of the further columns; they must be finite on model tokens


@dataclass(frozen=True)
class Judgement:
    """The written columns, each [B, R]; ``rollout_is_weights`` None when the correction makes none, ``session_weight`` [B]."""

    token_level_scores: Tensor
    token_level_rewards: Tensor
    advantages: Tensor
    returns: Tensor
    loss_mask: Tensor
    rollout_is_weights: Tensor | None
    session_weight: Tensor
    report: StageReport
    by_env: dict[str, EnvMetrics]  # empty when the environments are not known


@dataclass(frozen=True)
class _Correction:
    """What the rollout correction says; None, None without one."""

    weights: Tensor | None
    accept: Tensor | None
    metrics: dict[str, float]


def judge(
    keys: list[str],
    response_mask: Tensor,
    rewards: Tensor,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor | None,
    config: AlgorithmConfig,
    *,
    columns: Mapping[str, Any] | None = None,
    controller: KLController | None = None,
    lags: Tensor | None = None,
    envs: list[str] | None = None,
) -> Judgement:
    """Tensors [B, R]. Scores 1, NaN, 0, 0.5 of one group give 0.999998, 0, -0.999998, 0; the second row's loss_mask is 0.

    ``columns``: what else the estimator reads, by field name. ``controller``: of the KL in the reward (None: none); it is moved by this batch.
    ``lags`` [B, R]: versions between a token's sampling and this step; ``envs``: the environment of each row; both for metrics.
    """
    columns = dict(columns or {})
    per_token = {"old_log_probs": old_log_probs, "rollout_log_probs": rollout_log_probs} | {name: columns.get(name) for name in _PER_TOKEN}
    check_finite(per_token, response_mask, keys)
    parsed = [TrajectoryKey.parse(key) for key in keys]
    uids, names = [key.uid for key in parsed], {"session_ids": [key.session_id for key in parsed], "output_index": [key.index for key in parsed]}
    correction = _correct(old_log_probs, rollout_log_probs, response_mask, config, lags)
    rewards = _without_bad_components(rewards, columns, config)
    samples = collect_samples(rewards, response_mask, uids, accept=correction.accept, **names)
    accepted_B = torch.as_tensor(samples.accepted_S[samples.row_sample_B])
    large_B = torch.as_tensor(_large_groups(samples, config, names["session_ids"])[samples.group_S[samples.row_sample_B]])
    judged_BR = response_mask * large_B[:, None]  # a dropped group has no token for the estimator: it moves no statistic of the batch
    accept_BR = (accepted_B & large_B)[:, None] & (response_mask.bool() if correction.accept is None else correction.accept.bool())
    scores = torch.where(accepted_B[:, None], rewards, torch.zeros(()))
    penalised, kl_metrics = _penalise(scores, old_log_probs, columns.get("ref_log_prob"), accept_BR & response_mask.bool(), config, controller)
    known = columns | names | {"token_level_scores": scores, "old_log_probs": old_log_probs, "rollout_is_weights": correction.weights}
    raw_advantages, raw_returns = advantages.get(config.adv_estimator)(
        penalised, judged_BR, index=uids, config=config, accept=accept_BR, **{name: value for name, value in known.items() if value is not None}
    )
    kept = response_mask.bool() & accept_BR
    zero = torch.zeros(())
    final, returns = torch.where(kept, raw_advantages, zero), torch.where(kept, raw_returns, zero)
    check_finite({"advantages": final}, kept, keys)
    metrics = correction.metrics | kl_metrics | reward_metrics(samples, penalised, final, returns, kept) | length_metrics(response_mask)
    metrics |= token_metrics(response_mask, kept, columns.get("entropy")) | value_metrics(columns.get("values"), returns, kept)
    weights = session_weights([key.uid + f"_{key.session_id}" for key in parsed], kept)
    report = StageReport(metrics, _rejections(keys, samples, large_B.tolist()))
    by_env = {} if envs is None else env_metrics(samples, envs)
    return Judgement(scores, penalised, final, returns, kept.long(), correction.weights, weights, report, by_env)


def check_finite(columns: Mapping[str, Tensor | None], mask: Tensor, keys: list[str]) -> None:
    """ProtocolError with the keys of the rows in which a column has NaN or Inf under the mask: one such token must not reach a sibling."""
    for name, value in columns.items():
        if value is None:
            continue
        bad = [keys[i] for i in torch.nonzero((~torch.isfinite(value) & mask.bool()).any(1)).flatten().tolist()]
        if bad:
            raise ProtocolError(f"{name} is finite on model tokens, got NaN or Inf in {len(bad)} rows such as {bad[:3]}; check the stage that wrote it")


def _correct(old: Tensor, rollout: Tensor | None, mask: Tensor, config: AlgorithmConfig, lags: Tensor | None) -> _Correction:
    """In bypass mode old is the rollout's: there is nothing to compare before the update."""
    if rollout is None or config.rollout_correction.bypass_mode:
        return _Correction(None, None, {})
    weights, accept, metrics = rollout_correction(old, rollout, mask, config.rollout_correction, lags=lags)
    gap = {f"training/rollout_log_prob_{name}": value for name, value in log_prob_gap(old, rollout, mask).items() if name != "gap_row_worst"}
    return _Correction(weights, accept, metrics | rollout_probs_diff(old, rollout, mask) | gap)


def _without_bad_components(rewards: Tensor, columns: Mapping[str, Any], config: AlgorithmConfig) -> Tensor:
    """gdpo: a row whose reward component is missing or not finite has no finite reward either, so that its sample is rejected."""
    if config.adv_estimator != "gdpo" or not config.gdpo_reward_keys:
        return rewards
    values_KB = np.stack([component(columns, key, len(rewards)) for key in config.gdpo_reward_keys])
    return torch.where(torch.as_tensor(np.isfinite(values_KB).all(axis=0))[:, None], rewards, torch.nan)


def _penalise(
    scores: Tensor, old: Tensor, ref: Tensor | None, mask: Tensor, config: AlgorithmConfig, controller: KLController | None
) -> tuple[Tensor, dict[str, float]]:
    """token_level_rewards, and the controller after this batch."""
    if controller is None:
        return scores, {}
    assert ref is not None, "the reference stage runs before this one when a KL is in the reward"
    beta = controller.beta
    rewards, kl, num_rows = kl_in_reward(scores, old, ref, mask, beta=beta, kind=config.kl_penalty)
    if num_rows:
        controller.update(kl, num_rows)
    return rewards, {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": beta}


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

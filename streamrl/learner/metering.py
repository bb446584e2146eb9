"""What a learner rank exports of a batch beside its reports. Decides nothing."""

from __future__ import annotations

import math

import torch

from streamrl.errors import MissingField
from streamrl.learner.batch_columns import Columns, get
from streamrl.learner.judge_metrics import EnvMetrics
from streamrl.learner.rows import Column
from streamrl.protocol.meta import KVBatchMeta
from streamrl.telemetry.metrics import Metrics


def meter_envs(metrics: Metrics, by_env: dict[str, EnvMetrics]) -> None:
    """Rewards and group shares of one batch, by environment."""
    for env, found in by_env.items():
        metrics.set("streamrl_batch_reward_mean", found.reward_mean, env=env)
        metrics.set("streamrl_batch_reward_std", found.reward_std, env=env)
        metrics.set("streamrl_group_singleton_ratio", found.singleton_ratio, env=env)
        if not math.isnan(found.zero_variance_ratio):
            metrics.set("streamrl_group_zero_variance_ratio", found.zero_variance_ratio, env=env)


def meter_token_lags(metrics: Metrics, store: Columns, share: KVBatchMeta) -> None:
    """Versions between the sampling of each trained token of this rank and the step that trained it: one observation a lag. Rows of tests may not tell."""
    version = (share.extra_info or {}).get("version")
    if version is None or not len(share):
        return
    try:
        columns = get(store, share, ["rollout_versions", "loss_mask"])
    except MissingField:
        return
    versions, mask = (Column.of(columns[name]).padded() for name in ("rollout_versions", "loss_mask"))
    lags, counts = torch.unique((version - versions[mask.bool()]).clamp(min=0), return_counts=True)
    for lag, count in zip(lags.tolist(), counts.tolist(), strict=True):
        metrics.observe("streamrl_token_version_lag", lag, times=count)

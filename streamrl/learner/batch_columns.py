"""What the advantage stage reads of a batch: the store's columns as right-padded tensors [B, R], chosen by the configuration.

Asks for a column only when something needs it, and for the engine's log-probs also for metrics. Knows nothing of what is made of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from tensordict import TensorDict
from torch import Tensor

from streamrl.config.objective import needed_columns, reads_rollout_log_probs
from streamrl.config.training import AlgorithmConfig
from streamrl.errors import ConfigError, MissingField
from streamrl.learner.judge import check_finite
from streamrl.learner.rows import Column
from streamrl.protocol.meta import KVBatchMeta
from streamrl.replay.zero_variance import env_of

_BASE = ("response_mask", "rm_scores", "old_log_probs")


class Columns(Protocol):
    """What a rank needs of the store: the columns that a meta names, in the order of its keys; all common ones when it names none. The tags say where
    the rows are."""

    def kv_batch_get_by_meta(self, meta: KVBatchMeta) -> TensorDict: ...
    def kv_batch_put_by_meta(self, meta: KVBatchMeta, fields: dict[str, Any]) -> Any: ...


def get(store: Columns, meta: KVBatchMeta, fields: list[str]) -> TensorDict:
    """These columns of the rows of ``meta``."""
    return store.kv_batch_get_by_meta(msgspec.structs.replace(meta, fields=fields))


@dataclass(frozen=True)
class BatchColumns:
    """Of one batch. ``further`` holds what the estimator and the metrics read beside the named ones."""

    response_mask: Tensor
    rm_scores: Tensor
    old_log_probs: Tensor
    rollout_log_probs: Tensor | None
    further: dict[str, Any]
    lags: Tensor | None  # versions between a token's sampling and this step
    lengths: list[int]

    def unpadded(self, values_BR: Tensor) -> list[Tensor]:
        """As the store keeps a token column."""
        return [row[:length] for row, length in zip(values_BR, self.lengths, strict=True)]


def read_batch(store: Columns, batch: KVBatchMeta, algorithm: AlgorithmConfig, *, with_values: bool = False) -> BatchColumns:
    """One get for what must be there, one for the engine's log-probs. ``with_values``: there is a critic, and an estimator of user code may read it."""
    version = (batch.extra_info or {}).get("version")
    others = list(dict.fromkeys([*further_columns(algorithm), *(["values"] if with_values else [])]))
    names = [*_BASE, *others, *([] if version is None else ["rollout_versions"])]
    columns = get(store, batch, list(dict.fromkeys(names)))
    mask = Column.of(columns["response_mask"])
    base = {name: Column.of(columns[name]).padded() for name in _BASE}
    lags = None if version is None else (version - Column.of(columns["rollout_versions"]).padded()).clamp(min=0)
    further = {name: _value(columns[name]) for name in others}
    return BatchColumns(**base, rollout_log_probs=_rollout_log_probs(store, batch, algorithm), further=further, lags=lags, lengths=mask.lengths().tolist())


def read_sessions(store: Columns, batch: KVBatchMeta) -> tuple[list[int], list[dict[str, Any]]]:
    """Turns and what the scorer said of each row, for metrics; empty where rows do not have them."""
    try:
        columns = get(store, batch, ["num_turns", "reward_extra_info"])
    except MissingField:
        return [], []
    return columns["num_turns"].tolist(), [extra for extra in columns["reward_extra_info"].tolist() if isinstance(extra, dict)]


def read_envs(store: Columns, batch: KVBatchMeta) -> list[str]:
    """The environment of each row, as metrics name it."""
    names = ("data_source", "agent_name")
    columns: dict[str, list[Any]] = {}
    for name in names:
        try:
            columns[name] = get(store, batch, [name])[name].tolist()
            break
        except MissingField:
            continue
    return [env_of({name: values[i] for name, values in columns.items()}) for i in range(len(batch))]


def further_columns(algorithm: AlgorithmConfig) -> list[str]:
    """What the estimator needs, the reference's log-probs for a KL in the reward, and the entropies that the scoring pass wrote."""
    needed = [name for name in needed_columns(algorithm.adv_estimator) if name not in _BASE]
    needed += ["ref_log_prob"] if algorithm.use_kl_in_reward else []
    return needed + ([] if algorithm.rollout_correction.bypass_mode else ["entropy"])


def _value(column: Any) -> Any:
    """Token columns [B, R], numbers [B], objects as a list."""
    if not isinstance(column, Tensor):
        return column.tolist()
    return column if column.dim() == 1 and not column.is_nested else Column.of(column).padded()


def _rollout_log_probs(store: Columns, batch: KVBatchMeta, algorithm: AlgorithmConfig) -> Tensor | None:
    """The engine's log-probs: needed by the correction, otherwise only for metrics."""
    try:
        return Column.of(get(store, batch, ["rollout_log_probs"])["rollout_log_probs"]).padded()
    except MissingField as error:
        if not reads_rollout_log_probs(algorithm):
            return None
        raise missing_log_probs() from error


def copy_log_probs(store: Columns, share: KVBatchMeta) -> None:
    """Bypass mode: the policy that sampled is the old one. No pass, no collective."""
    if not len(share):
        return
    try:
        columns = get(store, share, ["response_mask", "rollout_log_probs"])
    except MissingField as error:
        raise missing_log_probs() from error
    rollout, mask = (Column.of(columns[name]) for name in ("rollout_log_probs", "response_mask"))
    check_finite({"rollout_log_probs": rollout.padded()}, mask.padded(), share.keys)
    store.kv_batch_put_by_meta(share, {"old_log_probs": columns["rollout_log_probs"]})


def missing_log_probs() -> ConfigError:
    return ConfigError(
        "$.rollout.calculate_log_probs: algorithm.rollout_correction needs the engine's log-probs, got rows without rollout_log_probs; "
        "set rollout.calculate_log_probs=true, or algorithm.rollout_correction.rollout_is=null to train uncorrected"
    )

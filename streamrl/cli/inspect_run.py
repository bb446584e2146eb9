"""The layers of a run, from the sampled rows of one step: each rule of the row's way, checked on what was trained.

Reads the row's columns and tags only; what the store or the replay buffer knows beyond them isn't looked at. A column that is missing or too
short breaks the rule of every layer that needs it, with the key of its row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from streamrl.cli.inspect_layers import Layer, counted, shortened, spread
from streamrl.errors import DataError, MissingField, ProtocolError
from streamrl.protocol.fields import TRAJECTORY_FIELDS
from streamrl.protocol.keys import TrajectoryKey
from streamrl.protocol.trajectory import OBSERVATION_VERSION

if TYPE_CHECKING:
    from streamrl.config import Config
    from streamrl.telemetry.samples import Sample

PER_RESPONSE = ("response_mask", "loss_mask", "rm_scores", "rollout_versions", "rollout_log_probs", "old_log_probs", "advantages", "returns")


@dataclass(frozen=True)
class SampledRow:
    """One trajectory; ``row["responses"]`` is an array, a number or an object. MissingField for a column without this row."""

    key: str
    tag: dict[str, Any]
    values: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        if name not in self.values:
            raise MissingField(f"a trajectory has the column {name!r}, got none")
        return self.values[name]

    def parsed(self) -> TrajectoryKey | None:
        """None for a key that is none: the layer of keys says so."""
        try:
            return TrajectoryKey.parse(self.key)
        except ProtocolError:
            return None


def sampled_rows(sample: Sample) -> list[SampledRow]:
    """The sample row by row, in batch order."""
    columns = {name: column_values(column) for name, column in sample.columns.items()}
    return [
        SampledRow(key, tag, {name: values[i] for name, values in columns.items() if i < len(values)})
        for i, (key, tag) in enumerate(zip(sample.keys, sample.tags, strict=True))
    ]


def column_values(column: Any) -> list[Any]:
    """One value per row: arrays of tensors, plain objects of a stack."""
    import torch

    from streamrl.protocol.tensors.columns import is_stack

    if isinstance(column, torch.Tensor):
        return [row.numpy() for row in column.unbind()]
    return column.tolist() if is_stack(column) else list(column)


def run_layers(sample: Sample, config: Config) -> list[Layer]:
    """One line a layer, in the order of a row's way."""
    rows = sampled_rows(sample)
    groups = _groups(rows)
    return [
        _dataset_row(rows, config),
        _collate(sample),
        _keys(rows, groups, config.rollout.n),
        _tags(rows),
        _masks(rows),
        _rewards(rows),
        _advantages(rows),
        _complete(groups, config),
        update_layer(config),
    ]


def _broken(rows: Sequence[SampledRow], rule: Callable[[SampledRow], str | None]) -> list[str]:
    """The key, the rule and what was found, for each row that breaks it."""
    problems = []
    for row in rows:
        try:
            problem = rule(row)
        except MissingField as error:
            problem = str(error)
        if problem:
            problems.append(f"{row.key}: {problem}")
    return problems


def _sums(rows: Sequence[SampledRow], name: str) -> list[float]:
    """Sum over each row's tokens; rows without the column are left out."""
    return [float(np.sum(row[name])) for row in rows if name in row.values]


def _groups(rows: Sequence[SampledRow]) -> dict[str, list[TrajectoryKey]]:
    groups: dict[str, list[TrajectoryKey]] = {}
    for row in rows:
        if key := row.parsed():
            groups.setdefault(key.uid, []).append(key)
    return groups


def _dataset_row(rows: list[SampledRow], config: Config) -> Layer:
    from msgspec.structs import replace

    from streamrl.data.rules import check_row

    data, by_rule = replace(config.data, prompt_key="raw_prompt", tool_config_path=None), config.reward.custom_reward_function is None

    def rule(row: SampledRow) -> str | None:
        try:
            check_row(row.values, data, rule_rewards=by_rule)
        except DataError as error:
            return str(error)
        return None

    first = rows[0].values if rows else {}
    truth = (first.get("reward_model") or {}).get("ground_truth")
    messages, fields = len(first.get("raw_prompt") or []), len(first.get("extra_info") or {})
    found = f"{counted(messages, 'message')}, ground_truth {shortened(truth, 16)}, extra_info of {fields}"
    return Layer("prompt", "object", "data", "dataset row", found, _broken(rows, rule))


def _collate(sample: Sample) -> Layer:
    """Every column has one row per key and its declared dtype."""
    import torch

    size, broken = len(sample.keys), []
    for name, column in sample.columns.items():
        got = len(column_values(column))
        if got != size:
            key = sample.keys[min(got, size - 1)]
            broken.append(f"{key}: dim 0 of every column is the number of keys ({size}), got {got} in {name!r}")
        declared = TRAJECTORY_FIELDS.get(name)
        dtype = str(column.dtype).removeprefix("torch.") if isinstance(column, torch.Tensor) else "object"
        if declared is not None and dtype != declared.dtype:
            broken.append(f"{sample.keys[0]}: column {name!r} is {declared.kind} {declared.dtype}, got {dtype}")
    tensors = sum(isinstance(column, torch.Tensor) for column in sample.columns.values())
    found = f"{counted(tensors, 'tensor')}, dim 0 = {size}; {counted(len(sample.columns) - tensors, 'object column')}, length {size}"
    return Layer("trajectory", "TensorDict", "data", "collate", found, broken)


def _keys(rows: list[SampledRow], groups: dict[str, list[TrajectoryKey]], n: int) -> Layer:
    def rule(row: SampledRow) -> str | None:
        key = row.parsed()
        if key is None:
            return "a key reads uid_session_index with two non-negative numbers, got another form"
        if key.session_id >= n:
            return f"session ids are below rollout.n = {n}, got {key.session_id}"
        columns = (row["uid"], int(row["session_id"]), int(row["output_index"]))
        if columns != (key.uid, key.session_id, key.index):
            return f"columns uid, session_id and output_index are those of the key, got {columns}"
        outputs = sum(other.session_id == key.session_id for other in groups[key.uid])
        return None if key.index < outputs else f"outputs of a session are numbered from 0 without a gap, got {key.index} among {outputs}"

    sessions = [len({key.session_id for key in keys}) for keys in groups.values()]
    found = f"{counted(len(groups), 'uid')}, sessions per uid {spread(sessions)}, expected n = {n}"
    return Layer("trajectory", "KVBatchMeta", "key", "keys", found, _broken(rows, rule))


def _tags(rows: list[SampledRow]) -> Layer:
    def rule(row: SampledRow) -> str | None:
        prompt, response = len(row["prompts"]), len(row["responses"])
        for name, length in (("prompt_len", prompt), ("response_len", response), ("seq_len", prompt + response)):
            if row.tag.get(name) != length:
                return f"tag {name} counts the row's tokens ({length}), got {row.tag.get(name)}"
        if not np.array_equal(row["input_ids"], np.concatenate([row["prompts"], row["responses"]])):
            return f"input_ids are prompts followed by responses, got {len(row['input_ids'])} other ids"
        versions = row["rollout_versions"][row["response_mask"] == 1] if len(row["rollout_versions"]) == len(row["response_mask"]) else []
        for name, version in (("min_global_steps", min(versions, default=None)), ("max_global_steps", max(versions, default=None))):
            if version is not None and row.tag.get(name) != version:
                return f"tag {name} is a version of the row's tokens ({version}), got {row.tag.get(name)}"
        return None

    found = "  ".join(f"{name} {spread([row.tag[name] for row in rows if name in row.tag])}" for name in ("prompt_len", "response_len", "seq_len"))
    return Layer("trajectory", "KVBatchMeta", "key", "tags", found, _broken(rows, rule))


def _masks(rows: list[SampledRow]) -> Layer:
    def rule(row: SampledRow) -> str | None:
        size, mask, loss = len(row["responses"]), row["response_mask"], row["loss_mask"]
        lengths = {name: len(row[name]) for name in PER_RESPONSE if name in row.values and len(row[name]) != size}
        if lengths:
            return f"per-token columns have the length of responses ({size}), got {lengths}"
        if not np.isin(mask, (0, 1)).all() or not np.isin(loss, (0, 1)).all():
            return f"masks hold 0 and 1, got response_mask {sorted(set(mask.tolist()))} and loss_mask {sorted(set(loss.tolist()))}"
        if not mask.any():
            return "a row has a token that the model wrote, got response_mask of zeros"
        if (loss > mask).any():
            return f"only tokens that the model wrote are trained, got {int((loss > mask).sum())} others in loss_mask"
        if ((row["rollout_versions"] == OBSERVATION_VERSION) != (mask == 0)).any():
            return f"rollout_versions are {OBSERVATION_VERSION} exactly where response_mask is 0, got others"
        if "rollout_log_probs" in row.values and row["rollout_log_probs"][mask == 0].any():
            return "rollout_log_probs are 0.0 where response_mask is 0, got others"
        return None

    responses = sum(len(row["responses"]) for row in rows if "responses" in row.values)
    valid, loss = int(sum(_sums(rows, "response_mask"))), int(sum(_sums(rows, "loss_mask")))
    found = f"{responses} response tokens, {valid} valid, {loss} in the loss"
    return Layer("trajectory", "TensorDict", "data", "masks", found, _broken(rows, rule))


def _rewards(rows: list[SampledRow]) -> Layer:
    def rule(row: SampledRow) -> str | None:
        scores, mask = row["rm_scores"], row["response_mask"]
        if not np.isfinite(scores).all():
            return f"rm_scores are finite, got {shortened(scores[~np.isfinite(scores)].tolist())}"
        if len(scores) == len(mask) and scores[mask == 0].any():
            return "rewards sit on tokens that the model wrote, got one where response_mask is 0"
        return None

    sums = _sums(rows, "rm_scores")
    found = f"rm_scores.sum() {spread(sums, 3)}" + (f", mean {np.mean(sums):.3f}" if sums else "")
    return Layer("trajectory", "TensorDict", "data", "rewards", found, _broken(rows, rule))


def _advantages(rows: list[SampledRow]) -> Layer:
    def rule(row: SampledRow) -> str | None:
        values, loss = row["advantages"], row["loss_mask"]
        if not np.isfinite(values).all():
            return f"advantages are finite, got {int((~np.isfinite(values)).sum())} that are not"
        if len(values) == len(loss) and values[loss == 0].any():
            return "advantages are 0 where loss_mask is 0, got others"
        return None

    values = [float(value) for row in rows if "advantages" in row.values for value in row["advantages"]]
    return Layer("trajectory", "TensorDict", "data", "advantages", f"{spread(values, 3)} per token", _broken(rows, rule))


def _complete(groups: dict[str, list[TrajectoryKey]], config: Config) -> Layer:
    n, least = config.rollout.n, config.replay.min_sessions or min(2, config.rollout.n)
    found, broken = [], []
    for uid, keys in groups.items():
        sessions = len({key.session_id for key in keys})
        size = f"complete {n}/{n}" if sessions == n else f"PARTIAL {sessions}/{n}"
        found.append(size if len(keys) == sessions else f"{size} in {counted(len(keys), 'row')}")
        if not least <= sessions <= n:
            broken.append(f"{uid}: a trained group has {least} (replay.min_sessions) to {n} (rollout.n) sessions, got {sessions}")
    shown = {text: found.count(text) for text in found}
    return Layer("prompt", "group", "key", "groups", ", ".join(f"{number} {text}" for text, number in shown.items()) or "none", broken)


def update_layer(config: Config) -> Layer:
    """How a whole batch is cut, from the configuration alone; ranks may differ by one row."""
    batch, mini, n, ranks = config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.rollout.n, config.learner.ranks
    rows = mini * n
    broken = [f"$.actor.ppo_mini_batch_size: data.train_batch_size ({batch}) is a multiple of it, got {mini}"] if batch % mini else []
    share = f"{rows // ranks} each" if rows % ranks == 0 else f"{rows // ranks} or {rows // ranks + 1} each (not divisible)"
    found = f"{batch // mini} x ({mini} x {n} = {rows} trajectories), DP size {ranks}: {share}"
    return Layer("trajectory", "mini-batch", "key", "update", found, broken)

"""The columns of a trajectory: dtype, kind and ragged axis of each known field. Unknown fields are object columns.

A kind is declared, never guessed from the data: six answers of equal length are still ragged, a score is still one scalar per row.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from streamrl.protocol.trajectory import Trajectory

Kind = Literal["scalar", "dense", "ragged", "object"]


class ColumnSpec(msgspec.Struct, frozen=True):
    """``scalar``: shape (B,). ``dense``: (B, *inner_shape). ``ragged``: per row one axis of free length, at ``ragged_dim`` of the row
    (-1 = last), ``inner_shape`` are the other axes. ``object``: one msgpack value per row; dtype is "object"."""

    dtype: str
    kind: Kind
    ragged_dim: int | None = None
    inner_shape: tuple[int, ...] = ()


OBJECT = ColumnSpec("object", "object")
_IDS = ColumnSpec("int64", "ragged", -1)
_FLOATS = ColumnSpec("float32", "ragged", -1)
_NUMBER = ColumnSpec("int64", "scalar")

TRAJECTORY_FIELDS: dict[str, ColumnSpec] = {
    "prompts": _IDS,  # [P] as sent to the engine
    "responses": _IDS,  # [R] model and observation tokens in order
    "response_mask": _IDS,  # [R] 1 = written by the policy
    "loss_mask": _IDS,  # [R] response_mask until the advantage stage replaces it by the final effective mask
    "input_ids": _IDS,  # [P+R]
    "position_ids": _IDS,  # [P+R]; text rows 0..L-1
    "rollout_log_probs": _FLOATS,  # [R] engine log-prob at the token's own version; 0.0 on observations
    "rollout_versions": ColumnSpec("int32", "ragged", -1),  # [R] -1 on observations
    "rm_scores": _FLOATS,  # [R] outcome reward on the last model token
    "old_log_probs": _FLOATS,  # [R] under the proximal policy (weights before this step's first update)
    "ref_log_prob": _FLOATS,
    "values": _FLOATS,
    "entropy": _FLOATS,
    "token_level_scores": _FLOATS,
    "token_level_rewards": _FLOATS,
    "advantages": _FLOATS,
    "returns": _FLOATS,
    "rollout_is_weights": _FLOATS,
    "num_turns": _NUMBER,
    "session_id": _NUMBER,
    "output_index": _NUMBER,
}


def trajectory_columns(rows: list[Trajectory]) -> dict[str, list]:
    """Columns of freshly generated rows: numpy arrays for known fields, plain values for object columns. Checks every row."""
    columns: dict[str, list] = {name: [] for name in ("prompts", "responses", "response_mask", "loss_mask", "input_ids", "position_ids")}
    columns |= {name: [] for name in ("rollout_versions", "num_turns", "session_id", "output_index", "uid", "stop_reason", "reward_extra_info")}
    for row in rows:
        row.check()
        mask = np.asarray(row.response_mask, np.int64)
        columns["prompts"].append(np.asarray(row.prompt_ids, np.int64))
        columns["responses"].append(np.asarray(row.response_ids, np.int64))
        columns["response_mask"].append(mask)
        columns["loss_mask"].append(mask)
        columns["input_ids"].append(np.asarray(row.prompt_ids + row.response_ids, np.int64))
        columns["position_ids"].append(np.arange(len(row.prompt_ids) + len(row.response_ids), dtype=np.int64))
        columns["rollout_versions"].append(np.asarray(row.rollout_versions, np.int32))
        columns["num_turns"].append(row.num_turns)
        columns["session_id"].append(row.key.session_id)
        columns["output_index"].append(row.key.index)
        columns["uid"].append(row.key.uid)
        columns["stop_reason"].append(row.stop_reason)
        columns["reward_extra_info"].append(row.reward_extra)
    if all(row.response_logprobs is not None for row in rows):
        columns["rollout_log_probs"] = [np.asarray(row.response_logprobs, np.float32) for row in rows]
    if all(row.reward is not None for row in rows):
        columns["rm_scores"] = [_outcome_reward(row) for row in rows]
    passed = {name for row in rows for name in (*row.row, *row.extra)} - set(columns)
    for name in sorted(passed):
        columns[name] = [row.extra.get(name, row.row.get(name)) for row in rows]
    return columns


def _outcome_reward(row: Trajectory) -> np.ndarray:
    """The scalar reward on the last token the model wrote, so that the sum over the answer is the score and no mask hides it."""
    scores = np.zeros(len(row.response_ids), np.float32)
    scores[int(np.flatnonzero(row.response_mask)[-1])] = row.reward
    return scores


def trajectory_tag(row: Trajectory, attempt: int, seq_no: int, global_steps: int) -> dict[str, int | str]:
    """The plain values that travel with the key."""
    return {
        "status": "success",
        "global_steps": global_steps,
        "seq_no": seq_no,
        "attempt": attempt,
        "prompt_len": len(row.prompt_ids),
        "response_len": len(row.response_ids),
        "seq_len": len(row.prompt_ids) + len(row.response_ids),
        "min_global_steps": row.min_version,
        "max_global_steps": row.max_version,
    }

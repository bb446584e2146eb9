"""The columns of a trajectory: dtype, kind and ragged axis of each known field. Unknown fields are object columns.

A kind is declared, never guessed from the data: six answers of equal length are still ragged, a score is still one scalar per row.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from streamrl.errors import ProtocolError
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

# P and R are the tokens of prompt and response, L = P + R. Of a known field the dtype, the kind and the ragged axis are fixed; inner axes are free.
TRAJECTORY_FIELDS: dict[str, ColumnSpec] = {
    "prompts": _IDS,  # [P] as sent to the engine
    "responses": _IDS,  # [R] model and observation tokens in order
    "response_mask": _IDS,  # [R] 1 = written by the policy
    "loss_mask": _IDS,  # [R] response_mask until the advantage stage replaces it by the final effective mask
    "input_ids": _IDS,  # [L] prompts followed by responses
    "position_ids": _IDS,  # [L], in text rows 0..L-1; [C, L] with the C = 3 or 4 components of multi-component RoPE
    "rollout_log_probs": _FLOATS,  # [R] engine log-prob at the token's own version; 0.0 on observations
    "rollout_versions": ColumnSpec("int32", "ragged", -1),  # [R] -1 on observations
    "rm_scores": _FLOATS,  # [R] outcome reward on the last model token; finite
    "old_log_probs": _FLOATS,  # [R] under the proximal policy (weights before this step's first update)
    "ref_log_prob": _FLOATS,  # [R] under the reference model
    "sum_pi_squared": _FLOATS,  # [R] sum over the vocabulary of pi^2, of the policy that gave old_log_probs
    "values": _FLOATS,  # [R] of the critic
    "entropy": _FLOATS,  # [R] of the policy at each token
    "token_level_scores": _FLOATS,  # [R] rm_scores
    "token_level_rewards": _FLOATS,  # [R] the same after KL-in-reward
    "advantages": _FLOATS,  # [R] of the estimator
    "returns": _FLOATS,  # [R] of the estimator; the critic's target
    "rollout_is_weights": _FLOATS,  # [R] detached correction weights
    "reward_baselines": ColumnSpec("float32", "scalar"),  # score of the greedy answer to the row's prompt
    "session_weight": ColumnSpec("float32", "scalar"),  # 1 / rows of the session with a trainable token; 0 for a row without one
    "routed_experts": ColumnSpec("int16", "ragged", 0),  # [L, layers, top_k] experts the engine chose, for routing replay
    "num_turns": _NUMBER,  # user and assistant turns + 1
    "session_id": _NUMBER,  # TrajectoryKey.session_id
    "output_index": _NUMBER,  # TrajectoryKey.index; column "index" is the dataset's
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
        columns["position_ids"].append(_positions(row))
        columns["rollout_versions"].append(np.asarray(row.rollout_versions, np.int32))
        columns["num_turns"].append(row.num_turns)
        columns["session_id"].append(row.key.session_id)
        columns["output_index"].append(row.key.index)
        columns["uid"].append(row.key.uid)
        columns["stop_reason"].append(row.stop_reason)
        columns["reward_extra_info"].append(row.reward_extra)
    if _all_or_none("response_logprobs", rows):
        columns["rollout_log_probs"] = [np.asarray(row.response_logprobs, np.float32) for row in rows]
    if _all_or_none("reward", rows):
        columns["rm_scores"] = [_outcome_reward(row) for row in rows]
    passed = {name for row in rows for name in (*row.row, *row.extra)} - set(columns)
    for name in sorted(passed):
        columns[name] = [row.extra.get(name, row.row.get(name)) for row in rows]
    return columns


def _all_or_none(name: str, rows: list[Trajectory]) -> bool:
    """Whether the rows have this optional value; some with and some without would lose the values of the former."""
    missing = [str(row.key) for row in rows if getattr(row, name) is None]
    if missing and len(missing) < len(rows):
        raise ProtocolError(f"{name} is given for all rows of a put or for none, got None for {missing} of {len(rows)} rows; put those rows by themselves")
    return not missing


def _positions(row: Trajectory) -> np.ndarray:
    if row.position_ids is None:
        return np.arange(len(row.prompt_ids) + len(row.response_ids), dtype=np.int64)
    return np.asarray(row.position_ids, np.int64)


def _outcome_reward(row: Trajectory) -> np.ndarray:
    """The scalar reward on the last token the model wrote, so that the sum over the answer is the score and no mask hides it; turn rewards likewise."""
    scores = np.zeros(len(row.response_ids), np.float32)
    for place, reward in row.turn_rewards:
        scores[place] += reward
    scores[int(np.flatnonzero(row.response_mask)[-1])] += row.reward
    return scores


NODE_TAG = "node"  # tag of a row's store, in a run of several nodes
UNSCORED_TAG = "unscored"  # tag of a row that comes without a reward: the learner's reward model scores it


def trajectory_tag(row: Trajectory, attempt: int, seq_no: int, global_steps: int) -> dict[str, int | str]:
    """The plain values that travel with the key."""
    tag: dict[str, int | str] = {
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
    return tag if row.reward is not None else tag | {UNSCORED_TAG: 1}

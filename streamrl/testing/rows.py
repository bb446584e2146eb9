"""Rows with plain defaults, for tests that need one and do not care what it says."""

from __future__ import annotations

from typing import Any

from streamrl.protocol.keys import TrajectoryKey
from streamrl.protocol.trajectory import Trajectory


def make_trajectory(
    uid: str = "a", session_id: int = 0, *, version: int = 0, reward: float = 1.0, response_ids: tuple[int, ...] = (6, 2), **changes: Any
) -> Trajectory:
    """A finished single-turn row: one prompt token, ``response_ids`` written under ``version``."""
    size = len(response_ids)
    fields: dict[str, Any] = {
        "key": TrajectoryKey(uid, session_id, 0),
        "prompt_ids": [5],
        "response_ids": list(response_ids),
        "response_mask": [1] * size,
        "response_logprobs": [-0.1] * size,
        "rollout_versions": [version] * size,
        "reward": reward,
        "num_turns": 2,
        "stop_reason": "eos",
    }
    return Trajectory(**fields | changes)

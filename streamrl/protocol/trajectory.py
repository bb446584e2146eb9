"""One prompt and one trajectory, as they travel from the dataset to the store.

Glossary: a *prompt* is a dataset row; a *session* is one attempt at it; a *trajectory* is one row a session produced (usually one);
a *group* is all trajectories of a prompt. P prompts with ``rollout.n = n`` give P*n trajectories.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from streamrl.errors import ProtocolError
from streamrl.protocol.keys import TrajectoryKey

OBSERVATION_VERSION = -1  # rollout_versions entry of a token the model did not write


class Prompt(msgspec.Struct, frozen=True):
    """A dataset row that has been given a name. ``row`` holds msgpack-able columns (``raw_prompt``, ``data_source``, ``reward_model``, ...)."""

    uid: str
    row: dict[str, Any]
    epoch: int  # 0-based
    position: int  # place in the epoch's order, 0-based


class Trajectory(msgspec.Struct):
    """One row: what the engine received, what it produced, and what it earned.

    Worked example (single turn, prompt of 3 tokens, answer of 2 under version 4)::

        prompt_ids = [5, 6, 7]   response_ids = [11, 2]   response_mask = [1, 1]
        response_logprobs = [-.1, -.05]   rollout_versions = [4, 4]   reward = 1.0

    With a tool observation of one token between two model tokens: mask [1, 0, 1], log-prob 0.0 and version -1 at the middle.
    """

    key: TrajectoryKey
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]  # 1 = written by the policy, 0 = observation
    response_logprobs: list[float] | None  # None = the run does not record them; never partly
    rollout_versions: list[int]
    reward: float | None  # None = a reward model scores it later; finite otherwise
    num_turns: int
    stop_reason: str
    reward_extra: dict[str, Any] = {}  # what the scorer returned beside the score
    row: dict[str, Any] = {}  # dataset columns, passed through
    extra: dict[str, Any] = {}  # turn_scores, tool_rewards: same key set in every row of a session
    turn_rewards: list[tuple[int, float]] = []  # (place in the response, reward) of single turns, beside the outcome's
    position_ids: list[list[int]] | None = None  # [C][L] of multi-component RoPE; None = text, 0 .. L - 1

    def check(self) -> None:
        """ProtocolError when lengths are not aligned, the prompt or the answer is empty, no token is the model's, or a number is not finite."""
        size = len(self.response_ids)
        lengths = {"response_mask": len(self.response_mask), "rollout_versions": len(self.rollout_versions)}
        if self.response_logprobs is not None:
            lengths["response_logprobs"] = len(self.response_logprobs)
        wrong = {name: got for name, got in lengths.items() if got != size}
        if wrong:
            raise ProtocolError(f"per-token lists have the length of response_ids ({size}), got {wrong} in {self.key}; the agent loop must keep them aligned")
        if not self.prompt_ids or not size:
            raise ProtocolError(f"a row has a prompt and a response token, got {len(self.prompt_ids)} and {size} in {self.key}; end such a session as failed")
        if not any(self.response_mask):
            raise ProtocolError(f"a row has a token written by the model, got none in {self.key}; end such a session as failed")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ProtocolError(f"a reward is finite, got {self.reward} in {self.key}; end such a session as failed")
        if self.response_logprobs is not None and not all(map(math.isfinite, self.response_logprobs)):
            place = next(i for i, value in enumerate(self.response_logprobs) if not math.isfinite(value))
            got = f"{self.response_logprobs[place]} at token {place} in {self.key}"
            raise ProtocolError(f"log-probs of the engine are finite, got {got}; end such a session as failed")
        self._check_positions(len(self.prompt_ids) + size)

    def _check_positions(self, tokens: int) -> None:
        got = None if self.position_ids is None else [len(component) for component in self.position_ids]
        if got is not None and (not got or set(got) != {tokens}):
            raise ProtocolError(
                f"each component of position_ids has one entry per prompt and response token ({tokens}), got {got} in {self.key}; leave text rows at None"
            )

    @property
    def min_version(self) -> int:
        """Oldest weight version among the model's tokens (version 0 is a version, not "unset")."""
        return min(v for v, m in zip(self.rollout_versions, self.response_mask, strict=True) if m)

    @property
    def max_version(self) -> int:
        """Newest weight version among the model's tokens."""
        return max(v for v, m in zip(self.rollout_versions, self.response_mask, strict=True) if m)

"""The tokens of one session: what the engine wrote and what was put between, with mask, log-prob and version of each token.

Guarantees: the per-token lists have one length after every call; a model token stays as the engine sampled it; the response never grows
past its budget or the model's length; the row ends with a model token. Knows nothing of text: ids of observations come from ``turns.py``.

One rule decides whether an observation fits, here and nowhere else: after it, at least one token must be left for the model. With a budget
of 6 and 4 tokens written, an observation of 1 token is appended; one of 2 or 3 is not, its tokens are counted as dropped.
"""

from __future__ import annotations

from typing import Any

from streamrl.errors import ProtocolError, SessionFailed
from streamrl.protocol.generate import GenerateResult
from streamrl.rollout.base import AgentLoopOutput

OBSERVED_VERSION = -1  # of a token that no weights computed


class Transcript:
    """Grows by model turns and observations.

    Worked example, budget 10: the model writes 3 tokens under version 4, a weight push, 2 under version 5; an observation of 3; the model
    writes 2 under version 5, which uses up the budget::

        mask     = [1, 1, 1, 1, 1,  0,  0,  0, 1, 1]
        versions = [4, 4, 4, 5, 5, -1, -1, -1, 5, 5]    log_probs are 0.0 at places 5-7    versions_spanned = 2
    """

    def __init__(self, prompt_ids: list[int], *, response_length: int, model_len: int, with_log_probs: bool) -> None:
        self.prompt_ids = list(prompt_ids)
        self.response_length = response_length
        self.model_len = model_len
        self.dropped_observation_tokens = 0  # refused by the budget, or left unanswered at the end
        self._with_log_probs = with_log_probs
        self._ids: list[int] = []
        self._mask: list[int] = []
        self._log_probs: list[float] = []
        self._versions: list[int] = []

    @property
    def ids(self) -> list[int]:
        """What the next call sends: prompt and response so far."""
        return self.prompt_ids + self._ids

    @property
    def used(self) -> int:
        """Response tokens so far, observations included."""
        return len(self._ids)

    @property
    def left(self) -> int:
        """Tokens that still fit the response budget and the model's length."""
        return max(0, min(self.response_length - self.used, self.model_len - len(self.prompt_ids) - self.used))

    @property
    def num_model_tokens(self) -> int:
        return sum(self._mask)

    @property
    def num_observation_tokens(self) -> int:
        return self.used - self.num_model_tokens

    @property
    def versions_spanned(self) -> int:
        """How many weight versions wrote model tokens; 0 when there are none."""
        return len(set(self._versions) - {OBSERVED_VERSION})

    def room(self, asked: int, per_call: int | None) -> int:
        """Tokens that the next call may ask for: min(limit per call, what is left, what the caller asked for); 0 means no call is made.

        Worked example: budget 100, limit 30, a caller that asks for 500, a model that never stops: 30, 30, 30, 10, 0.
        """
        return max(0, min(asked, self.left, self.left if per_call is None else per_call))

    def add_model(self, result: GenerateResult) -> None:
        """Append what the engine wrote. What goes past the budget is cut, from all lists together; ProtocolError when they are not aligned."""
        sizes = {len(result.token_ids), len(result.versions)} | ({len(result.log_probs or ())} if self._with_log_probs else set())
        if len(sizes) > 1:
            raise ProtocolError(f"every token of an engine has its log-prob and version, got lists of {sorted(sizes)} values; look at the engine")
        size = min(self.left, len(result.token_ids))
        self._ids += result.token_ids[:size]
        self._mask += [1] * size
        self._versions += result.versions[:size]
        self._log_probs += result.log_probs[:size] if self._with_log_probs else []

    def add_observation(self, ids: list[int]) -> bool:
        """Append tokens the model did not write. False, and only the dropped tokens counted, when none would be left for the model."""
        if len(ids) >= self.left:
            self.dropped_observation_tokens += len(ids)
            return False
        self._ids += ids
        self._mask += [0] * len(ids)
        self._versions += [OBSERVED_VERSION] * len(ids)
        self._log_probs += [0.0] * len(ids) if self._with_log_probs else []
        return True

    def output(self, stop_reason: str, num_turns: int, *, reward_score: float | None = None, **extra: Any) -> AgentLoopOutput:
        """The row, without observations that nothing answered; ``extra`` joins its extra_fields. SessionFailed(empty_output) without a model token."""
        self._drop_unanswered()
        if not self._ids:
            raise SessionFailed("a row has at least one token of the model, got none; raise data.max_response_length", reason="empty_output")
        return AgentLoopOutput(
            prompt_ids=list(self.prompt_ids),
            response_ids=list(self._ids),
            response_mask=list(self._mask),
            response_logprobs=list(self._log_probs) if self._with_log_probs else None,
            rollout_versions=list(self._versions),
            stop_reason=stop_reason,
            num_turns=num_turns,
            reward_score=reward_score,
            extra_fields={"turn_scores": [], "tool_rewards": []} | extra,
        )

    def _drop_unanswered(self) -> None:
        answered = next((place + 1 for place in reversed(range(self.used)) if self._mask[place]), 0)
        self.dropped_observation_tokens += self.used - answered
        for values in (self._ids, self._mask, self._versions, self._log_probs):
            del values[answered:]

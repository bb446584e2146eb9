"""One answer to score: made of a session's last output as the rollout has it, or of a stored row, by the same code for both."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import msgspec

from streamrl.protocol.chat import ChatTokenizer


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """``text`` is the response, observations included, without special tokens. ``extra_info`` is the row's own and how the session went:
    ``num_turns``, ``final_answer`` (what the model wrote after the last observation), ``tool_outcomes``, ``turn_scores``, ``tool_rewards``."""

    row: dict[str, Any]  # dataset columns
    text: str
    extra_info: dict[str, Any] = {}
    num_prompt_tokens: int = 0
    num_tokens: int = 0  # of the response, observations included

    @classmethod
    def of(
        cls,
        row: dict[str, Any],
        tokenizer: ChatTokenizer,
        *,
        num_prompt_tokens: int,
        response_ids: Sequence[int],
        response_mask: Sequence[int],
        told: dict[str, Any],
    ) -> Answer:
        """``told``: what the session says beside the final answer; it goes before the row's own extra_info."""
        ids = list(response_ids)
        written = list(takewhile(lambda token: token[1], reversed(list(zip(ids, response_mask, strict=True)))))
        final = tokenizer.decode([token for token, _ in reversed(written)], skip_special_tokens=True)
        return cls(
            row=row,
            text=tokenizer.decode(ids, skip_special_tokens=True),
            extra_info={**(row.get("extra_info") or {}), "final_answer": final, **told},
            num_prompt_tokens=num_prompt_tokens,
            num_tokens=len(ids),
        )


def wants_model(row: dict[str, Any]) -> bool:
    """Whether a model is to score the row: its ``reward_model.style`` is "model"; any other style, or none, means a rule."""
    return (row.get("reward_model") or {}).get("style") == "model"

"""Padded batches: answers read from rows, and rewards put back on their tokens. The same for a manager's call and for the learner's reward model.

Only the last output of a session is scored; its reward goes to all of them. Rows without uid, session_id and output_index are sessions of their own.
Loops of user code may tell a score function more than a row keeps: of ``extra_info`` there is here what :class:`Answer` lists.

Shapes: B rows, P and R padded prompt and response length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamrl.protocol.answer import Answer
from streamrl.protocol.chat import ChatTokenizer
from streamrl.protocol.dataproto import DataProto

if TYPE_CHECKING:
    from streamrl.rewards.managers.base import RewardManager

Rewards = Sequence[tuple[float, dict[str, Any]]]  # (reward, extra)
TOLD = ("tool_outcomes", "turn_scores", "tool_rewards")  # columns that a score function finds in extra_info


async def score_batch(manager: RewardManager, data: DataProto, tokenizer: ChatTokenizer) -> DataProto:
    """``rm_scores`` [B, R] and ``reward_extra_info`` of all rows; the first answer that can't be scored ends the call."""
    last = last_outputs(data)
    scored = sorted(set(last))
    rewards = await asyncio.gather(*(manager.score(answer) for answer in answers(data, scored, tokenizer)))
    return rewarded(data, last, dict(zip(scored, rewards, strict=True)))


def last_outputs(data: DataProto) -> list[int]:
    """For each row the row of its session's last output. Outputs 0 and 10 of a session: both get the row of output 10."""
    if not {"session_id", "output_index"} <= set(data.batch.keys()) or "uid" not in data.non_tensor_batch:
        return list(range(len(data)))
    sessions = list(zip(data.non_tensor_batch["uid"].tolist(), data.batch["session_id"].tolist(), strict=True))
    outputs = data.batch["output_index"].tolist()
    last: dict[tuple[str, int], int] = {}
    for row, session in enumerate(sessions):
        if session not in last or outputs[row] > outputs[last[session]]:
            last[session] = row
    return [last[session] for session in sessions]


def answers(data: DataProto, rows: Sequence[int], tokenizer: ChatTokenizer) -> list[Answer]:
    """The answers of these rows."""
    prompt_width = data.batch["prompts"].shape[1]
    prompt_B, response_B = data.batch["attention_mask"][:, :prompt_width].sum(1), data.batch["attention_mask"][:, prompt_width:].sum(1)
    return [_answer(data, row, int(prompt_B[row]), int(response_B[row]), tokenizer) for row in rows]


def _answer(data: DataProto, row: int, prompt_len: int, response_len: int, tokenizer: ChatTokenizer) -> Answer:
    columns = {name: values[row] for name, values in data.non_tensor_batch.items()}
    told: dict[str, Any] = {"tool_outcomes": {}} | {name: columns[name] for name in TOLD if columns.get(name) is not None}
    if "num_turns" in data.batch.keys():
        told["num_turns"] = int(data.batch["num_turns"][row])
    return Answer.of(
        columns,
        tokenizer,
        num_prompt_tokens=prompt_len,
        response_ids=data.batch["responses"][row, :response_len].tolist(),
        response_mask=data.batch["response_mask"][row, :response_len].tolist(),
        told=told,
    )


def rewarded(data: DataProto, last: Sequence[int], rewards: dict[int, tuple[float, dict[str, Any]]]) -> DataProto:
    """The batch of all rows' rewards; ``rewards`` by the rows that ``last`` names."""
    scores_BR = torch.zeros(data.batch["responses"].shape, dtype=torch.float32)
    places_B = _last_model_tokens(data.batch["response_mask"])
    scores_BR[torch.arange(len(data)), places_B] = torch.tensor([rewards[row][0] for row in last], dtype=torch.float32)
    return DataProto.from_dict({"rm_scores": scores_BR}, {"reward_extra_info": [rewards[row][1] for row in last]})


def _last_model_tokens(mask_BR: Tensor) -> Tensor:
    """The place of the last 1 of each row, so that no mask hides a reward."""
    return (mask_BR.bool() * torch.arange(mask_BR.shape[1])).argmax(1)

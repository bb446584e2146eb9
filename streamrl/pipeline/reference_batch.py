"""Batches of the synchronous oracle: prompts and answers as DataProto, padded to fixed widths. See ``reference.py`` for the letters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from streamrl.protocol import DataProto
from streamrl.protocol.generate import GenerateResult
from streamrl.protocol.trajectory import Prompt


def tensors_of(data: DataProto) -> TensorDict:
    """The tensor columns; every batch here has some."""
    assert data.batch is not None
    return data.batch


def prompt_batch(prompts: list[Prompt]) -> DataProto:
    """P prompts as a DataProto: one object column per dataset column, and the uid."""
    names = sorted(set.union(*(set(prompt.row) for prompt in prompts)) - {"uid"})
    columns: dict[str, Any] = {name: object_column([prompt.row.get(name) for prompt in prompts]) for name in names}
    columns["uid"] = object_column([prompt.uid for prompt in prompts])
    columns["dummy_tensor"] = torch.zeros((len(prompts), 1), dtype=torch.uint8)
    return DataProto.from_single_dict(columns)


def object_column(values: list[Any]) -> np.ndarray:
    """One element per row, also when the values are lists of one length."""
    column = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        column[i] = value
    return column


def padded_batch(prompts: list[list[int]], results: list[GenerateResult], max_prompt: int, max_response: int, pad_id: int = 0) -> DataProto:
    """Left-padded prompts and right-padded answers as columns [B, MP], [B, MR] and [B, MP + MR]."""
    rows = len(prompts)
    columns = {
        "prompts": torch.full((rows, max_prompt), pad_id),
        "responses": torch.full((rows, max_response), pad_id),
        "response_mask": torch.zeros(rows, max_response, dtype=torch.int64),
        "rollout_log_probs": torch.zeros(rows, max_response),
    }
    attention = torch.zeros(rows, max_prompt + max_response, dtype=torch.int64)
    for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        size = len(result.token_ids)
        columns["prompts"][i, max_prompt - len(prompt) :] = torch.tensor(prompt)
        columns["responses"][i, :size] = torch.tensor(result.token_ids)
        columns["response_mask"][i, :size] = 1
        columns["rollout_log_probs"][i, :size] = torch.tensor(result.log_probs)
        attention[i, max_prompt - len(prompt) : max_prompt + size] = 1
    columns["input_ids"] = torch.cat([columns["prompts"], columns["responses"]], dim=1)
    columns["attention_mask"] = attention
    columns["position_ids"] = (attention.cumsum(1) - 1).clamp(min=0)
    return DataProto.from_dict(tensors=columns)

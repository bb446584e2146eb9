"""From a stored row to the row that an agent loop receives, and the overlong filter. Torch-free, shared by dataset and prompt stream.

Token ids never leave this file: the filter tokenises only to measure, with the very call whose ids the engine will get.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import msgspec
import numpy as np

from streamrl.config.data import DataConfig
from streamrl.data.files import Row, limited
from streamrl.errors import DataError
from streamrl.protocol.chat import ChatTokenizer, prompt_ids

MAX_UNMEASURABLE = 0.01  # share of rows whose template may fail before the data set counts as broken

log = logging.getLogger(__name__)


def agent_row(row: Row, data: DataConfig) -> Row:
    """A fresh copy of ``row`` with the columns every agent loop relies on: raw_prompt, extra_info, index, tools_kwargs, interaction_kwargs."""
    out = copy.deepcopy(row)
    extra = out.get("extra_info") or {}
    out["raw_prompt"] = copy.deepcopy(row[data.prompt_key])
    out["extra_info"] = extra
    out["index"] = extra.get("index") or 0
    out["tools_kwargs"] = extra.get("tools_kwargs") or {}
    out["interaction_kwargs"] = extra.get("interaction_kwargs") or {}
    return out


def wire_row(row: Row, data: DataConfig) -> Row:
    """:func:`agent_row` for a process boundary: msgpack-able, and without the prompt column, which ``raw_prompt`` repeats."""
    out = agent_row(row, data)
    if data.prompt_key != "raw_prompt":
        del out[data.prompt_key]
    return msgspec.to_builtins(out, builtin_types=(bytes,), enc_hook=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise DataError(f"columns of a row hold text, numbers, lists and objects, got {type(value).__name__}; convert the column")


def subsample(rows: list[Row], max_samples: int, *, shuffle: bool, seed: int) -> list[Row]:
    """All rows, or ``max_samples`` of them: a seeded choice without replacement when shuffling, else the first ones."""
    size = limited(len(rows), max_samples)
    if size == len(rows):
        return rows
    if not shuffle:
        return rows[:size]
    return [rows[i] for i in np.random.default_rng(seed).choice(len(rows), size=size, replace=False)]


def without_overlong(rows: list[Row], data: DataConfig, tokenizer: ChatTokenizer) -> list[Row]:
    """Rows whose templated prompt has at most ``data.max_prompt_length`` tokens; rows that cannot be measured are dropped and counted.

    DataError when more than ``MAX_UNMEASURABLE`` of the rows fail (a broken template must not quietly empty a data set) or none is left.
    """
    kept: list[Row] = []
    failures: list[Exception] = []
    for row in rows:
        try:
            length = len(prompt_ids(tokenizer, row[data.prompt_key], data.apply_chat_template_kwargs))
        except Exception as error:  # templates are user code and raise anything
            failures.append(error)
            continue
        if length <= data.max_prompt_length:
            kept.append(row)
    if len(failures) > MAX_UNMEASURABLE * len(rows):
        first = f"{type(failures[0]).__name__}: {failures[0]}"
        raise DataError(
            f"at most {MAX_UNMEASURABLE:.0%} of the rows may fail in the chat template, got {len(failures)} of {len(rows)} (first: {first}); fix it"
        )
    too_long = len(rows) - len(kept) - len(failures)
    if not kept:
        raise DataError(f"some prompts must fit data.max_prompt_length={data.max_prompt_length} tokens, got none of {len(rows)}; raise the limit")
    log.info("overlong filter: %d rows before, %d after, %d too long, %d could not be measured", len(rows), len(kept), too_long, len(failures))
    return kept

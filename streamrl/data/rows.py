"""From a stored row to the row that an agent loop receives. Torch-free, shared by dataset and prompt stream. Nothing here tokenises."""

from __future__ import annotations

import copy
from typing import Any

from streamrl.config.data import DataConfig
from streamrl.data.media import Row, media_keys, with_media
from streamrl.data.rules import check_row
from streamrl.data.wire import check_made_names, check_wire, plain
from streamrl.errors import DataError


def agent_row(row: Row, data: DataConfig) -> Row:
    """A fresh copy of ``row`` with the columns every agent loop relies on: raw_prompt, extra_info, index, tools_kwargs, interaction_kwargs.

    The media columns are left out: their values are parts of ``raw_prompt``.
    """
    media = set(media_keys(data).values())
    out = copy.deepcopy({name: value for name, value in row.items() if name not in media})
    extra = out.get("extra_info") or {}
    out["raw_prompt"] = copy.deepcopy(with_media(row, data))
    out["extra_info"] = extra
    out["index"] = extra.get("index") or 0
    out["tools_kwargs"] = extra.get("tools_kwargs") or {}
    out["interaction_kwargs"] = extra.get("interaction_kwargs") or {}
    return out


def wire_row(row: Row, data: DataConfig) -> Row:
    """:func:`agent_row` for a process boundary: msgpack-able, and without the prompt column, which ``raw_prompt`` repeats."""
    return _for_the_wire(agent_row(row, data), data)


def wire_custom_row(row: Any, data: DataConfig) -> Row:
    """The same for what a custom dataset class returns: its ``raw_prompt`` or else its prompt column is checked, its own columns are kept.

    The dummy tensor, which carries nothing, is left behind.
    """
    if not isinstance(row, dict):
        raise DataError(f"a dataset class returns a dict for a row, got {type(row).__name__}; correct its __getitem__")
    given = {name: value for name, value in row.items() if name != "dummy_tensor" and value is not None}
    check_made_names(given)
    check_wire(given)
    stored = {**given, data.prompt_key: given["raw_prompt"]} if "raw_prompt" in given else given
    check_row(stored, data, rule_rewards=False)
    media = set(media_keys(data).values())
    return _for_the_wire({**agent_row(stored, data), **{name: value for name, value in given.items() if name not in {"raw_prompt", *media}}}, data)


def _for_the_wire(row: Row, data: DataConfig) -> Row:
    return plain({name: value for name, value in row.items() if name != data.prompt_key or name == "raw_prompt"})

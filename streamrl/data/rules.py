"""What a row must be. Each rule raises DataError with field, rule and what was found; who reads the file adds file and row number.

A row that passes has a non-empty list of {role, content} messages with a place for every image, video and audio, and, when it is scored by
a rule, a source and a ground truth. What the text says is not looked at, so a prompt that is rendered chat text inside a message is not
recognised; a prompt that is text instead of messages is refused and never templated.
"""

from __future__ import annotations

from typing import Any

from streamrl.config.data import DataConfig
from streamrl.config.tools import check_selection
from streamrl.data.media import Row, with_media
from streamrl.errors import DataError, WrongData
from streamrl.protocol.answer import wants_model

_EXTRA_TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "index": ((int, str), "a number or text"),
    "tools_kwargs": (dict, "an object: tool name -> {create_kwargs}"),
    "interaction_kwargs": (dict, "an object"),
    "need_tools_kwargs": (bool, "true or false"),
}


def check_row(row: Any, data: DataConfig, *, rule_rewards: bool) -> None:
    """DataError for the first rule that ``row`` breaks; ``rule_rewards`` asks for data_source and ground_truth too, unless a model scores the row."""
    if not isinstance(row, dict):
        raise DataError(f"a row is an object, got {type(row).__name__}; write one JSON object per row")
    if not isinstance(row.get("agent_name") or "", str):
        raise DataError(f"field 'agent_name' is the name of an agent loop, got {_short(row['agent_name'])}; write text or leave it out")
    if not isinstance(row.get("__do_sample__", True), bool):
        raise DataError(f"field '__do_sample__' is true or false, got {_short(row['__do_sample__'])}; correct it or leave it out")
    if row.get("__rollout_n__") is not None:
        raise DataError(f"field '__rollout_n__' is not taken: every group has rollout.n sessions, got {_short(row['__rollout_n__'])}; remove the column")
    _check_prompt(row, data.prompt_key)
    with_media(row, data)
    _check_extra_info(row.get("extra_info"))
    if not isinstance(row.get("reward_model") or {}, dict):
        raise DataError(f"field 'reward_model' is an object like {{style: rule, ground_truth: ...}}, got {_short(row['reward_model'])}; correct it")
    check_selection(data, row.get("extra_info"))
    if rule_rewards and not wants_model(row):
        _check_source(row, data.reward_fn_key)
        _check_ground_truth(row)


def _check_prompt(row: Row, key: str) -> None:
    if key not in row:
        raise DataError(f"field {key!r} (data.prompt_key) is required, got a row with {_keys(row)}; rename the column or set data.prompt_key")
    messages = row[key]
    if messages is None:
        raise DataError(f"field {key!r} is a non-empty list of {{role, content}} messages, got null; fill it or remove the row")
    if not isinstance(messages, list):
        raise WrongData(f"field {key!r} is a list of {{role, content}} messages, got {_short(messages)}; wrap text as [{{role: user, content: text}}]")
    if not messages:
        raise DataError(f"field {key!r} is a non-empty list of {{role, content}} messages, got []; fill it or remove the row")
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not _is_content(message.get("content")):
            raise DataError(f"field {key}[{place}] has a text role and a content of text or typed parts, got {_short(message)}; correct the message")


def _is_content(content: Any) -> bool:
    return isinstance(content, str) or (isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in content))


def _check_extra_info(extra: Any) -> None:
    if extra is None:
        return
    if not isinstance(extra, dict):
        raise DataError(f"field 'extra_info' is an object, got {_short(extra)}; write an object or leave it out")
    for name, (types, meaning) in _EXTRA_TYPES.items():
        if extra.get(name) is not None and not isinstance(extra[name], types):
            raise DataError(f"field 'extra_info.{name}' is {meaning}, got {_short(extra[name])}; correct it or leave it out")
    for tool, given in (extra.get("tools_kwargs") or {}).items():
        if given is not None and (not isinstance(given, dict) or not isinstance(given.get("create_kwargs") or {}, dict)):
            raise DataError(
                f"field 'extra_info.tools_kwargs.{tool}' is an object like {{create_kwargs: {{...}}}}, got {_short(given)}; correct it or leave it out"
            )


def _check_source(row: Row, source_key: str) -> None:
    if not isinstance(row.get(source_key), str) or not row[source_key]:
        got = _short(row[source_key]) if source_key in row else f"a row with {_keys(row)}"
        raise DataError(f"field {source_key!r} (data.reward_fn_key) names the scorer in text, got {got}; add it or set reward.custom_reward_function")


def _check_ground_truth(row: Row) -> None:
    reward_model = row.get("reward_model")
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        got = _keys(row) if reward_model is None else f"reward_model = {_short(reward_model)}"
        raise DataError(f"field 'reward_model.ground_truth' is required for rule rewards, got {got}; add it or set reward.custom_reward_function")


def _keys(row: Row) -> str:
    return f"the keys {', '.join(sorted(map(str, row)))}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

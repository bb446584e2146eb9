"""Reading what the model wrote, and checking what the user configured; shared by the interactions that ship."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from streamrl.config.base import Section
from streamrl.errors import ConfigError

S = TypeVar("S", bound=Section)


def last_answer(messages: Sequence[dict[str, Any]]) -> str:
    """Text of the newest assistant message, "" when there is none. Parts of a multimodal message are joined."""
    for message in reversed(messages):
        if message.get("role") == "assistant":
            content = message.get("content") or ""
            if isinstance(content, str):
                return content
            return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return ""


def settings(config: dict[str, Any], section: type[S]) -> S:
    """The ``config`` of an entry as its section; ConfigError names the wrong key. ``name`` belongs to every interaction."""
    try:
        return msgspec.convert({key: value for key, value in config.items() if key != "name"}, section)
    except msgspec.ValidationError as error:
        raise ConfigError(f"config has the keys {', '.join(section.__struct_fields__)}, got one where {error}; correct it") from None


def arguments(interaction_kwargs: dict[str, Any], section: type[S]) -> S:
    """The row's ``interaction_kwargs`` as a section. The error ends the session: the row is wrong, or meant for another interaction."""
    try:
        return msgspec.convert({key: value for key, value in interaction_kwargs.items() if key != "name"}, section)
    except msgspec.ValidationError as error:
        known = ", ".join(section.__struct_fields__)
        raise ValueError(f"extra_info.interaction_kwargs has the keys {known}, got a row where {error}; correct the row") from None

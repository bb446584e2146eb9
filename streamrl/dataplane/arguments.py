"""Checks of what a caller hands to the kv verbs, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamrl.errors import ProtocolError

_TAG_TYPES = (type(None), bool, int, float, str, bytes)


def key_list(keys: Sequence[str]) -> list[str]:
    """``keys`` as a list; ProtocolError for what are no names."""
    names = list(keys) if not isinstance(keys, str) else [keys]
    wrong = [name for name in names if not isinstance(name, str) or not name]
    if wrong or isinstance(keys, str):
        raise ProtocolError(f"keys and fields are lists of non-empty str, got {keys if isinstance(keys, str) else wrong[:5]!r}; wrap a single one in a list")
    return names


def check_tags(keys: list[str], tags: Sequence[dict[str, Any]]) -> None:
    """One plain dict per key, of values that every side can read."""
    if len(tags) != len(keys):
        raise ProtocolError(f"a put has one tag per key, got {len(tags)} tags for {len(keys)} keys; pass them together")
    for key, tag in zip(keys, tags, strict=True):
        if not isinstance(tag, dict):
            raise ProtocolError(f"a tag is a dict of names, got {type(tag).__name__} at {key!r}; pass name -> value")
        wrong = {name: type(value).__name__ for name, value in tag.items() if type(value) not in _TAG_TYPES or not isinstance(name, str)}
        if wrong:
            raise ProtocolError(f"tag values are None, bool, int, float, str or bytes under str names, got {wrong} at {key!r}; put other values into a column")

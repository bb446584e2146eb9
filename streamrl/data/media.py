"""Images, videos and audio of a row: ``<image>``, ``<video>`` and ``<audio>`` in the text of its messages become structured parts.

A kind counts for a row when its column (``data.image_key``, ...) is there and not null; then there are as many places for it as values.
In a row without that column the words stay text: a question about the HTML tag ``<video>`` needs no video. Values are paths, bytes or
objects such as {bytes, path}; nothing is opened or decoded here.
"""

from __future__ import annotations

import re
from typing import Any

from streamrl.config.data import DataConfig
from streamrl.errors import DataError, MediaMismatch

Row = dict[str, Any]
Messages = list[dict[str, Any]]


def media_keys(data: DataConfig) -> dict[str, str]:
    """Kind -> column."""
    return {"image": data.image_key, "video": data.video_key, "audio": data.audio_key}


def with_media(row: Row, data: DataConfig) -> Messages:
    """The row's messages with the media values in place, in order. MediaMismatch when places and values differ in number.

    >>> with_media({"prompt": [{"role": "user", "content": "<image>What is it?"}], "images": ["cat.png"]}, DataConfig())
    [{'role': 'user', 'content': [{'type': 'image', 'image': 'cat.png'}, {'type': 'text', 'text': 'What is it?'}]}]
    """
    media = {kind: _values(row[key], key) for kind, key in media_keys(data).items() if row.get(key) is not None}
    if not media:
        return row[data.prompt_key]
    places = dict.fromkeys(media, 0)
    messages = [{**message, "content": _content(message["content"], media, places)} for message in row[data.prompt_key]]
    for kind, key in media_keys(data).items():
        if kind in media and places[kind] != len(media[kind]):
            raise MediaMismatch(
                f"field {data.prompt_key!r} has one <{kind}> for every value of field {key!r}, got {places[kind]} and {len(media[kind])}; correct the row"
            )
    return messages


def has_media(row: Row, data: DataConfig) -> bool:
    """Whether the row asks for more than text: a value in a media column, or a part of a message that is not text."""
    contents = [message["content"] for message in row[data.prompt_key]]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(row.get(key) for key in media_keys(data).values()) or any(part["type"] != "text" for part in parts)


def _values(values: Any, key: str) -> list[Any]:
    if not isinstance(values, list) or not all(isinstance(value, str | bytes | dict) and value for value in values):
        raise DataError(f"field {key!r} is a list of paths, bytes or objects, got {values!r:.80}; correct the row")
    return values


def _content(content: str | list[dict[str, Any]], media: dict[str, list[Any]], places: dict[str, int]) -> str | list[dict[str, Any]]:
    """``content`` with values filled in; ``places`` counts what was met, also beyond the values there are. Text without a place stays text."""
    if isinstance(content, str):
        pieces = [piece for piece in re.split("(" + "|".join(f"<{kind}>" for kind in media) + ")", content) if piece]
        parts = [{"type": piece[1:-1]} if piece[1:-1] in media and piece[0] == "<" else {"type": "text", "text": piece} for piece in pieces]
        if all(part["type"] == "text" for part in parts):
            return content
    else:
        parts = content
    return [_filled(part, media, places) if set(part) == {"type"} and part["type"] in media else part for part in parts]


def _filled(part: dict[str, Any], media: dict[str, list[Any]], places: dict[str, int]) -> dict[str, Any]:
    kind = part["type"]
    place, places[kind] = places[kind], places[kind] + 1
    if place >= len(media[kind]):
        return part
    value = media[kind][place]
    return {**value, "type": kind} if isinstance(value, dict) else {"type": kind, kind: value}

"""Calls written as JSON, for all formats that use it: strict reading, and one rule for each oddity. Nothing is repaired.

| written | read as |
|---|---|
| ``{"name": "now"}``, or a name with no text behind it | a call with arguments ``{}`` |
| ``"arguments": "{\\"n\\": 3}"``, JSON text of an object | the object, once; ``parameters`` is the same key as ``arguments``, both at once an error |
| no name, a name or arguments of another type, ``null`` arguments, no object at all | an error |
| no arguments but keys beside name, id and type | an error, so that misplaced arguments never become ``{}`` |
| a second value or other text after the first, a raw newline in a string, a key twice, NaN, what Python cannot hold | an error |

An error is the text that the model gets as its observation; the name is kept when it can be read, the arguments are then ``{}``.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, NoReturn

from streamrl.rollout.parsers.answer import skip_blank
from streamrl.rollout.parsers.base import ToolCall

ARGUMENT_KEYS = ("arguments", "parameters")
CALL_KEYS = frozenset({"name", "id", "type", *ARGUMENT_KEYS})


class Malformed(NamedTuple):
    """What stands in place of a value that could not be read."""

    error: str


class Ended(NamedTuple):
    """A value, and where the text goes on after its closing tag."""

    value: Any
    end: int


def failed(name: str, error: str) -> ToolCall:
    return ToolCall(name, "{}", error)


def call_of(value: Any) -> ToolCall:
    """The call in an object with a name and arguments."""
    if isinstance(value, Malformed):
        return failed("", value.error)
    if not isinstance(value, dict):
        return failed("", f"a call is a JSON object with name and arguments, got {kind(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        return failed("", f"a call has a name, got {kind(name) if 'name' in value else 'none'}")
    given = [key for key in ARGUMENT_KEYS if key in value]
    if len(given) > 1:
        return failed(name, "a call has arguments or parameters, got both")
    if not given and (stray := sorted(value.keys() - CALL_KEYS)):
        return failed(name, f'arguments of a call stand under the key "arguments", got the keys {shorten(", ".join(stray))}')
    return call_with(name, value[given[0]] if given else {})


def call_with(name: str, arguments: Any) -> ToolCall:
    """The call of a name that was read elsewhere, with arguments that were read as JSON."""
    name = name.strip()
    if isinstance(arguments, str):
        arguments = read(arguments)
    if isinstance(arguments, Malformed):
        return failed(name, arguments.error)
    if not name:
        return failed("", "a call has a name, got none")
    if not isinstance(arguments, dict):
        return failed(name, f"arguments are a JSON object, got {kind(arguments)}")
    try:
        return ToolCall(name, dump(arguments))
    except (ValueError, TypeError, RecursionError) as error:
        return failed(name, f"arguments are plain JSON, got a value that is not: {error}")


def call_with_text(name: str, text: str) -> ToolCall:
    """The call of a name with arguments as text; blank text stands for no arguments."""
    return call_with(name, read(text) if text.strip() else {})


def read(text: str) -> Any:
    """The one value in ``text``, or Malformed."""
    try:
        value, end = _DECODER.raw_decode(text, skip_blank(text, 0))
    except (ValueError, RecursionError) as error:
        return Malformed(f"a call is valid JSON, got an error: {_reason(error)}")
    rest = text[end:].strip()
    return Malformed(f"a call is one JSON value, got more text after it: {shorten(rest)}") if rest else value


def read_closed(text: str, start: int, close: str) -> Ended | None:
    """The value between ``start`` and its closing tag; None when there is no closing tag.

    A closing tag inside a JSON string belongs to the string. When the text is no JSON, the first closing tag ends it.
    """
    value_end = start
    try:
        value, value_end = _DECODER.raw_decode(text, skip_blank(text, start))
        after = skip_blank(text, value_end)
        if text.startswith(close, after):
            return Ended(value, after + len(close))
    except (ValueError, RecursionError):
        pass
    end = text.find(close, value_end)
    return Ended(read(text[start:end]), end + len(close)) if end >= 0 else None


def first_value(text: str, start: int) -> Ended | None:
    """The value that begins at ``start``, whatever follows it; None when it is no JSON."""
    try:
        return Ended(*_DECODER.raw_decode(text, skip_blank(text, start)))
    except (ValueError, RecursionError):
        return None


def is_cut(text: str) -> bool:
    """Whether a text that is no JSON ends inside a string or with a bracket open, as an answer does that ran out of tokens."""
    depth = 0
    for found in _STRING_OR_SIGN.finditer(text):
        if found[0] == '"':  # the pattern takes whole strings first, so this one has no end
            return True
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(found[0], 0)
        if depth <= 0 and found[0] in "}]":  # whatever follows a closed value is another matter
            return False
    return depth > 0 or not text.strip()


def dump(value: Any) -> str:
    """JSON text that can be encoded; ValueError or TypeError for what JSON cannot say."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if _encodable(text) else json.dumps(value, allow_nan=False)


def kind(value: Any) -> str:
    names: dict[type, str] = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def shorten(text: str, limit_chars: int = 80) -> str:
    return text if len(text) <= limit_chars else f"{text[:limit_chars]}..."


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which an escape can write
        return False
    return True


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else shorten(str(error))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key stands twice in an object")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_STRING_OR_SIGN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}\[\]]', re.DOTALL)
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse)

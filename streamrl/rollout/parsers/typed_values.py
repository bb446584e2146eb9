"""Values that XML-style formats write as bare text, converted by the type that the tool's schema declares. Text is never evaluated as code.

* A declared string is the text itself. So is a parameter, or a whole tool, that no schema declares: the tool session refuses what it does not know.
* Any other type is read as JSON, or else as a Python literal (``True``, ``{'a': 1}``) of at most ``MAX_LITERAL_CHARS``, and must then be of that type.
* Of several types (a list of them, ``anyOf``, ``oneOf``, an ``enum``) the others go before string, so that ``null`` is null where null is allowed.
"""

from __future__ import annotations

import ast
import warnings
from typing import Any

from streamrl.rollout.parsers.base import ToolCall
from streamrl.rollout.parsers.json_calls import Malformed, call_with, failed, kind, read, shorten

MAX_LITERAL_CHARS = 4096  # the literal parser is recursive and slow; longer values come as JSON

_PYTHON: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
    "null": (type(None),),
}


def call_of_texts(name: str, texts: list[tuple[str, str]], schemas: list[dict[str, Any]] | None) -> ToolCall:
    """The call of ``name`` with parameters as (name, text) pairs; the same parameter twice is an error."""
    declared = _parameters(name.strip(), schemas)
    arguments: dict[str, Any] = {}
    for key, text in texts:
        if not key:
            return failed(name, "a parameter has a name, got none")
        if key in arguments:
            return failed(name, f"a parameter is given once, got {shorten(key)} twice")
        value = convert(text, _types(declared.get(key)))
        if isinstance(value, Malformed):
            return failed(name, f"parameter {shorten(key)}: {value.error}")
        arguments[key] = value
    return call_with(name, arguments)


def convert(text: str, types: set[str]) -> Any:
    """The value of ``text``, or Malformed when it is of none of the types."""
    others = types - {"string"}
    if not others:
        return text
    for value in _readings(text.strip()):
        if any(_is(value, name) for name in others):
            return value
    if "string" in types:
        return text
    return Malformed(f"a value of type {' or '.join(sorted(others))} is wanted, got {shorten(text.strip()) or 'nothing'}")


def _readings(text: str) -> list[Any]:
    value = read(text)
    if not isinstance(value, Malformed):
        return [value]
    if len(text) > MAX_LITERAL_CHARS:
        return []
    try:
        with warnings.catch_warnings():  # the compiler warns about odd escapes in the model's text
            warnings.simplefilter("ignore")
            return [ast.literal_eval(text)]
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return []


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _PYTHON.get(name, ()))


def _parameters(name: str, schemas: list[dict[str, Any]] | None) -> dict[str, Any]:
    for schema in schemas or ():
        function = schema.get("function", schema)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return properties if isinstance(properties, dict) else {}
    return {}


def _types(schema: Any) -> set[str]:
    """Names of the JSON types that a parameter's schema allows; {"string"} when it names none that is known."""
    if not isinstance(schema, dict):
        return {"string"}
    named = schema.get("type")
    found = {named} if isinstance(named, str) else set(named) if isinstance(named, list) else set()
    for option in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        found |= _types(option)
    if not found:
        found = {_NAMES[kind(value)] for value in schema.get("enum", ())}
    return found & _PYTHON.keys() | found & {"string"} or {"string"}


_NAMES = {"an object": "object", "an array": "array", "a string": "string", "a boolean": "boolean", "null": "null", "a number": "number"}

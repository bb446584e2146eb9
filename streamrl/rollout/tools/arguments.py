"""Checks what the model wrote as arguments of a call, before any code of a tool sees it. Decoding and checking only: nothing is evaluated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from streamrl.errors import ConfigError
from streamrl.rollout.tools.results import short

Check = Callable[[dict[str, Any]], dict[str, Any]]  # returns the arguments to pass on; BadArguments


class BadArguments(ValueError):
    """The model's mistake; the message is for the model."""


def parse(text: str) -> dict[str, Any]:
    """The object in ``text``. One JSON value, no NaN, no raw newline in a string; BadArguments else."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise BadArguments(short(f"Error: the arguments of a call are one JSON object, got malformed JSON ({error})")) from None
    if not isinstance(value, dict):
        raise BadArguments(f"Error: the arguments of a call are one JSON object, got {_kind(value)}")
    return value


def by_schema(schema: dict[str, Any], where: str) -> Check:
    """For class tools: the JSON Schema of ``parameters``. ConfigError when that is not a sound one. References to other documents are not fetched."""
    import jsonschema  # not needed where tools are only declared
    from referencing import Registry

    parameters = schema["function"].get("parameters") or {}
    cls = jsonschema.validators.validator_for(parameters, default=jsonschema.Draft202012Validator)
    try:
        cls.check_schema(parameters)
    except jsonschema.SchemaError as error:
        place = "parameters" + error.json_path.removeprefix("$")
        raise ConfigError(f"{where}: the parameters of a tool's schema are JSON Schema, got {place} where {error.message:.120}; correct it") from None
    kind = parameters.get("type", "object") if isinstance(parameters, dict) else parameters
    if kind != "object":
        raise ConfigError(f"{where}: the parameters of a tool's schema have type object, got {kind!r:.80}; correct it")
    validator = cls(parameters, registry=Registry())

    def check(arguments: dict[str, Any]) -> dict[str, Any]:
        error = jsonschema.exceptions.best_match(validator.iter_errors(arguments))
        if error is not None:
            raise BadArguments(short(f"Error: wrong arguments: {error.message} - at `{error.json_path}`"))
        return arguments

    return check


def by_hints(arguments_type: type[msgspec.Struct]) -> Check:
    """For function tools: the type hints, strictly. Values become what the hints say (an enum's member, a dataclass)."""

    def check(arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            converted = msgspec.convert(arguments, arguments_type)
        except msgspec.ValidationError as error:
            raise BadArguments(short(f"Error: wrong arguments: {error}")) from None
        return {name: getattr(converted, name) for name in arguments}

    return check


def _kind(value: Any) -> str:
    return {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number", type(None): "null"}[type(value)]

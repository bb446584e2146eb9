"""From a function's type hints and Google-style docstring to its OpenAI schema, and to the type that its arguments are converted to.

msgspec knows the types: numbers, text, lists, dicts, tuples, Literal, Optional, unions, enums, dataclasses, TypedDicts and Structs, nested as you
like, but not recursive ones. References are written out, for chat templates print schemas and models read them.
"""

from __future__ import annotations

import inspect
import itertools
import re
import typing
from collections.abc import Callable
from typing import Any

import msgspec

_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_PLAIN = (str, int, float, bool, type(None))


def describe(function: Callable[..., Any], name: str, description: str | None) -> tuple[dict[str, Any], type[msgspec.Struct]]:
    """(schema, type of the arguments). ValueError for what has no schema: variadic or positional-only parameters, missing hints or docstring.

    ``def add(a: int, b: int = 1)`` with the docstring "Adds." is ``{"type": "function", "function": {"name": "add", "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}}, "required": ["a"]}}}``.
    """
    text, documented = parse_docstring(inspect.getdoc(function) or "")
    if not (description or text):
        raise ValueError(f"a tool says in its docstring what it does, got none for {name}(); write one")
    arguments = _arguments(function, name)
    unknown = sorted(set(documented) - set(arguments.__struct_fields__))
    if unknown:
        raise ValueError(f"the docstring of a tool describes its parameters, got {', '.join(unknown)} for {name}(), which has no such parameter; correct it")
    parameters = _parameters(arguments, name)
    for parameter, said in documented.items():
        parameters["properties"][parameter]["description"] = said
    return {"type": "function", "function": {"name": name, "description": description or text, "parameters": parameters}}, arguments


def _arguments(function: Callable[..., Any], name: str) -> type[msgspec.Struct]:
    hints = typing.get_type_hints(function, include_extras=True)
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"the parameters of a tool have names, got {parameter} in {name}(), which is variadic or positional-only; name each of them")
        if parameter.name not in hints:
            raise ValueError(f"each parameter of a tool has a type hint, got none for {parameter.name!r} of {name}(); add it")
        fields.append((parameter.name, hints[parameter.name], *_default(parameter)))
    return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)


def _default(parameter: inspect.Parameter) -> tuple[Any, ...]:
    """The schema shows plain defaults; of others only that the parameter may be left out. The function applies them itself."""
    if parameter.default is parameter.empty:
        return ()
    return (parameter.default if isinstance(parameter.default, _PLAIN) else msgspec.field(default_factory=lambda: None),)


def _parameters(arguments: type[msgspec.Struct], name: str) -> dict[str, Any]:
    try:
        schema = msgspec.json.schema(arguments)
    except TypeError as error:
        raise ValueError(f"the type hints of a tool can be written as JSON Schema, got {str(error).splitlines()[-1]} in {name}(); use plain types") from None
    whole = _inlined({"$ref": schema["$ref"]}, schema["$defs"], ())
    return {key: whole[key] for key in ("type", "properties", "required")}


def _inlined(node: Any, defs: dict[str, Any], inside: tuple[str, ...]) -> Any:
    """``node`` with every reference replaced by what it refers to; a property that is itself named "title" stays."""
    if isinstance(node, list):
        return [_inlined(item, defs, inside) for item in node]
    if not isinstance(node, dict):
        return node
    if isinstance(node.get("$ref"), str):
        target = node["$ref"].rpartition("/")[2]
        if target in inside:
            raise ValueError(f"the type of a tool's parameter has an end, got the recursive {target}; use dict[str, Any]")
        found = {key: value for key, value in defs[target].items() if key != "title"}
        return {**_inlined(found, defs, (*inside, target)), **{key: value for key, value in node.items() if key != "$ref"}}
    return {key: _inlined(value, defs, inside) for key, value in node.items()}


def parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """(what stands before the first section, parameter -> description).

    >>> parse_docstring("Adds.\\n\\nArgs:\\n    a (int): First\\n        number.\\n    b: Second.\\nReturns:\\n    The sum.")
    ('Adds.', {'a': 'First number.', 'b': 'Second.'})
    """
    lines = text.splitlines()
    starts = [*(place for place, line in enumerate(lines) if _SECTION.match(line)), len(lines)]
    description = " ".join("\n".join(lines[: starts[0]]).split())
    documented: dict[str, str] = {}
    for start, end in itertools.pairwise(starts):
        if lines[start].startswith(("Args", "Arguments", "Parameters")):
            documented |= _documented([line for line in lines[start + 1 : end] if line.strip()])
    return description, documented


def _documented(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    depth = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    name = ""
    for line in lines:
        begins = _ARGUMENT.match(line.strip()) if len(line) - len(line.lstrip()) == depth else None
        if begins:
            name = begins[1]
            found[name] = begins[2].strip()
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found

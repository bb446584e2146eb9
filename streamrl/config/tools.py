"""Tool schemas: what a run's tool files declare, and which of them a row's chat template receives.

    tools:                                       # data.tool_config_path
      - class_name: my_package.Calculator        # a BaseTool, a function decorated by @tool, or the name of an entry point
        config: {type: native}
        tool_schema: {type: function, function: {name: calculate, description: ..., parameters: {type: object, properties: {...}}}}

The overlong filter and the agent loops ask :func:`row_tools`, so both send the same list to the template. Where every schema is written in the
file, no code of a tool is imported; else ``tool_code.py`` imports it, which the driver never asks for: it calls the ``check_`` functions alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from streamrl.config.base import Section
from streamrl.config.data import DataConfig
from streamrl.config.paths import resolve
from streamrl.config.yaml_text import from_text
from streamrl.errors import ConfigError, DataError

KEY = "$.data.tool_config_path"
FUNCTION_KEY = "$.rollout.multi_turn.function_tool_path"

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # of a function, in the OpenAI interface


class Tool(Section, frozen=True):
    """One entry. ``tool_schema`` is kept exactly as written, for templates print it; None: the class or function declares it."""

    class_name: str
    tool_schema: dict[str, Any] | None = None
    config: dict[str, Any] = {}

    @property
    def name(self) -> str | None:
        return self.tool_schema["function"]["name"] if self.tool_schema else None


@cache
def read_tools(path: str) -> tuple[Tool, ...]:
    """The tools of a file in its order; ConfigError when it is missing or an entry is not of the form above. Read once per process."""
    try:
        tree = from_text(Path(resolve(path)).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{KEY}: a readable YAML file, got {path} ({error}); correct the path") from error
    entries = tree.get("tools") if isinstance(tree, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{KEY}: {path} holds a non-empty list `tools:`, got {tree!r:.80}; write one entry per tool")
    tools = tuple(_tool(entry, f"{path}, tools[{place}]") for place, entry in enumerate(entries))
    check_names_differ([tool.name for tool in tools if tool.name], KEY, path)
    return tools


def _tool(entry: Any, where: str) -> Tool:
    try:
        tool = msgspec.convert(entry, Tool)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{KEY}: {where} has class_name, config and tool_schema, got an entry where {error}; correct it") from None
    if tool.config.get("type", "native") != "native":
        raise ConfigError(f"{KEY}: {where}.config.type is native, got {tool.config['type']!r:.80}; other kinds of tools are not supported")
    if tool.tool_schema is not None:
        check_schema(tool.tool_schema, KEY, f"{where}.tool_schema")
    return tool


def check_schema(schema: Any, key: str, where: str) -> None:
    """ConfigError for what is not an OpenAI function schema with a name, or requires what it doesn't have. Whether ``parameters`` is sound, the toolbox
    checks."""
    function = schema.get("function") if isinstance(schema, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(schema, dict) or schema.get("type") != "function" or not isinstance(name, str) or not name:
        raise ConfigError(f"{key}: {where} reads {{type: function, function: {{name: ...}}}}, got {schema!r:.120}; correct it")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{key}: {where} has a name of 1 to 64 letters, digits, _ and -, got {name!r:.80}; rename the tool")
    parameters = function.get("parameters") if isinstance(function, dict) else None
    if isinstance(parameters, dict):
        _check_required(parameters, key, where)


def _check_required(parameters: dict[str, Any], key: str, where: str) -> None:
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return  # no sound schema
    missing = [name for name in required if isinstance(name, str) and name not in properties]
    if missing:
        raise ConfigError(f"{key}: {where} requires what is among its properties, got {', '.join(missing)}, which is not; add it there or correct `required`")


def check_names_differ(names: list[str], key: str, where: str) -> None:
    """ConfigError when two tools have one name."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{key}: the tools of {where} have different names, got {', '.join(twice)} more than once; rename one")


def check_tool_files(data: DataConfig) -> None:
    """ConfigError for a tool file that is missing or not of its form. Imports nothing."""
    if data.tool_config_path is not None:
        read_tools(data.tool_config_path)
    path = data.function_tool_path
    if path is not None and (not path.endswith(".py") or not Path(resolve(path)).is_file()):
        raise ConfigError(f"{FUNCTION_KEY}: an existing Python file that ends in .py, got {path}; correct the path")


def check_selection(data: DataConfig, extra_info: dict[str, Any] | None) -> None:
    """DataError for a selected tool that does not exist, as far as the tools' names can be known without importing them."""
    tools = read_tools(data.tool_config_path) if data.tool_config_path else ()
    if data.function_tool_path is None and all(tool.name for tool in tools):
        row_tools(data, extra_info)
    elif (extra_info or {}).get("tool_selection") is not None:
        selected((extra_info or {})["tool_selection"], None)


def row_tools(data: DataConfig, extra_info: dict[str, Any] | None) -> list[dict[str, Any]] | None:
    """The schemas for one row, class tools first, each in its file's order: all, or those that ``extra_info.tool_selection`` names. None: no tools.

    DataError for a selected name that no tool has. Do not change the schemas: all rows share them.
    """
    if data.tool_config_path is None and data.function_tool_path is None:
        return None
    schemas = _schemas(data.tool_config_path, data.function_tool_path)
    selection = (extra_info or {}).get("tool_selection")
    if selection is None:
        return list(schemas.values())
    names = selected(selection, schemas)
    return [schema for name, schema in schemas.items() if name in names] or None


def selected(selection: Any, known: Collection[str] | None) -> list[str]:
    """``extra_info.tool_selection``, checked; ``known`` None: only that it is a list of names."""
    if isinstance(selection, list) and all(isinstance(name, str) and (known is None or name in known) for name in selection):
        return selection
    names = "" if known is None else f" ({', '.join(sorted(known))})"
    raise DataError(f"field 'extra_info.tool_selection' lists names of the run's tools{names}, got {selection!r:.80}; correct the row")


@cache
def _schemas(tool_config_path: str | None, function_tool_path: str | None) -> dict[str, dict[str, Any]]:
    written = read_tools(tool_config_path) if tool_config_path else ()
    if function_tool_path is None and all(tool.tool_schema for tool in written):
        return {str(tool.name): tool.tool_schema for tool in written if tool.tool_schema}
    from streamrl.config.tool_code import load_tools

    return {tool.name: tool.schema for tool in load_tools(tool_config_path, function_tool_path)}


def one_of(data_value: str | None, multi_turn_value: str | None, name: Literal["tool_config_path", "function_tool_path"]) -> str | None:
    """A path that has a key in ``data`` and one in ``rollout.multi_turn``, made absolute; ConfigError when they name different files."""
    paths = {resolve(value) for value in (data_value, multi_turn_value) if value}
    if len(paths) > 1:
        raise ConfigError(
            f"$.rollout.multi_turn.{name}: must be the same as data.{name} ({data_value}) when both are given, got {multi_turn_value!r}; set one of them"
        )
    return paths.pop() if paths else None

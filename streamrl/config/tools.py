"""Tool schemas: what the file of ``data.tool_config_path`` declares, and which of them a row's chat template receives.

    tools:
      - class_name: my_package.Calculator
        config: {type: native}
        tool_schema: {type: function, function: {name: calculate, description: ..., parameters: {type: object, properties: {...}}}}

The overlong filter and the agent loops ask :func:`row_tools`, so both send the same list to the template. Classes are neither imported
nor checked here.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from streamrl.config.base import Section
from streamrl.config.paths import resolve
from streamrl.config.yaml_text import from_text
from streamrl.errors import ConfigError, DataError

KEY = "$.data.tool_config_path"


class Tool(Section, frozen=True):
    """One entry; ``tool_schema`` is kept exactly as written, for templates print it."""

    class_name: str
    tool_schema: dict[str, Any]
    config: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return self.tool_schema["function"]["name"]


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
    names = [tool.name for tool in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{KEY}: the tools of {path} have different names, got {', '.join(twice)} more than once; rename one")
    return tools


def _tool(entry: Any, where: str) -> Tool:
    try:
        tool = msgspec.convert(entry, Tool)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{KEY}: {where} has a class_name and a tool_schema, got an entry where {error}; correct it") from None
    function = tool.tool_schema.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if tool.tool_schema.get("type") != "function" or not isinstance(name, str) or not name:
        raise ConfigError(f"{KEY}: {where}.tool_schema reads {{type: function, function: {{name: ...}}}}, got {tool.tool_schema!r:.120}; correct it")
    return tool


def row_tools(path: str | None, extra_info: dict[str, Any] | None) -> list[dict[str, Any]] | None:
    """The schemas for one row, in the file's order: all, or those that ``extra_info.tool_selection`` names. None: no tools.

    DataError for a selected name that the file does not have. Do not change the schemas: all rows share them.
    """
    if path is None:
        return None
    tools = read_tools(path)
    selection = (extra_info or {}).get("tool_selection")
    if selection is None:
        return [tool.tool_schema for tool in tools]
    known = {tool.name for tool in tools}
    if not isinstance(selection, list) or not all(isinstance(name, str) and name in known for name in selection):
        raise DataError(
            f"field 'extra_info.tool_selection' lists names of data.tool_config_path ({', '.join(sorted(known))}), got {selection!r:.80}; correct the row"
        )
    return [tool.tool_schema for tool in tools if tool.name in selection] or None

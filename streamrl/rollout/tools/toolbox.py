"""The tools of a run in one process: loaded and checked once, shared by all sessions.

Everything that can be wrong with a tool before a model calls it is a ConfigError here, so it shows when a rollout process starts. Doesn't run tools:
a session does (``session.py``).
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import msgspec

from streamrl.config.data import DataConfig
from streamrl.config.rollout import RolloutConfig
from streamrl.config.tool_code import LoadedTool, load_tools
from streamrl.config.tools import one_of, row_tools
from streamrl.errors import ConfigError
from streamrl.protocol.interfaces import Clock
from streamrl.rollout.tools.arguments import Check, by_hints, by_schema
from streamrl.rollout.tools.base import AgentData, BaseTool
from streamrl.rollout.tools.function import FunctionTool
from streamrl.rollout.tools.session import ToolSession
from streamrl.rollout.tools.threads import ToolThreads


class ReadyTool(msgspec.Struct, frozen=True):
    """A tool and the check of its arguments."""

    tool: BaseTool
    check: Check


class ToolBox:
    """All tools of a process. ``tools`` by name, in the order of their schemas."""

    def __init__(self, data: DataConfig, tools: dict[str, ReadyTool], threads: ToolThreads) -> None:
        self.tools = tools
        self.threads = threads
        self._data = data

    def schemas(self, extra_info: dict[str, Any] | None) -> list[dict[str, Any]] | None:
        """What the chat template of a row receives; None: no tools. DataError for a selected tool that does not exist."""
        return row_tools(self._data, extra_info)

    def session(self, extra_info: dict[str, Any] | None, agent_data: AgentData, rollout: RolloutConfig, clock: Clock) -> ToolSession:
        """For one row: only the tools it selects can be called."""
        names = [schema["function"]["name"] for schema in self.schemas(extra_info) or ()]
        return ToolSession(
            {name: self.tools[name] for name in names},
            tools_kwargs=(extra_info or {}).get("tools_kwargs") or {},
            agent_data=agent_data,
            timeout_s=rollout.timeouts.tool_s,
            max_parallel_calls=rollout.multi_turn.max_parallel_calls,
            clock=clock,
        )


def load_toolbox(data: DataConfig, rollout: RolloutConfig) -> ToolBox:
    """The process's toolbox for these files; imports user code. ConfigError for everything that no session could mend."""
    multi = rollout.multi_turn
    return _load(
        one_of(data.tool_config_path, multi.tool_config_path, "tool_config_path"),
        one_of(data.function_tool_path, multi.function_tool_path, "function_tool_path"),
    )


@cache
def _load(tool_config_path: str | None, function_tool_path: str | None) -> ToolBox:
    threads = ToolThreads()
    tools = {tool.name: _ready(tool, threads) for tool in load_tools(tool_config_path, function_tool_path)}
    return ToolBox(DataConfig(tool_config_path=tool_config_path, function_tool_path=function_tool_path), tools, threads)


def _ready(loaded: LoadedTool, threads: ToolThreads) -> ReadyTool:
    sound = by_schema(loaded.schema, loaded.where)
    function: Any = loaded.target
    if hasattr(function, "__tool_schema__"):
        declares_itself = loaded.schema is function.__tool_schema__
        _check_takes(loaded, function.__tool_arguments__)
        return ReadyTool(FunctionTool(function, loaded.schema, threads), by_hints(function.__tool_arguments__) if declares_itself else sound)
    if not isinstance(loaded.target, BaseTool):
        raise ConfigError(f"{loaded.where} must derive from streamrl.rollout.tools.BaseTool, got {type(loaded.target).__qualname__}; derive it")
    for method in ("create", "execute", "calc_reward", "release"):
        if not inspect.iscoroutinefunction(getattr(loaded.target, method)):
            raise ConfigError(f"{loaded.where}: {method} of a tool class must be async, got a plain function; write `async def {method}`")
    return ReadyTool(loaded.target, sound)


def _check_takes(loaded: LoadedTool, arguments: type[msgspec.Struct]) -> None:
    """A schema from the tool file shows the function's parameters under their names, and all that have no default."""
    shown = (loaded.schema["function"].get("parameters") or {}).get("properties", {})
    unknown = [str(name) for name in shown if name not in arguments.__struct_fields__]
    if unknown:
        takes = ", ".join(arguments.__struct_fields__) or "none"
        raise ConfigError(f"{loaded.where}: the properties of its tool_schema are parameters of the function ({takes}), got {', '.join(unknown)}; correct it")
    missing = [field.name for field in msgspec.structs.fields(arguments) if field.required and field.name not in shown]
    if missing:
        raise ConfigError(f"{loaded.where}: its tool_schema has every parameter without a default, got none for {', '.join(missing)}; add it to the properties")

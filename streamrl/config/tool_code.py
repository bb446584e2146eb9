"""Imports the code of tools: what the classes, functions and entry points of a run's tool files are. User code, so it may load anything.

A tool is recognised by its attributes, since what a tool *is* lies in a higher layer (``streamrl.rollout.tools``): a decorated function has
``__tool_schema__``, a class is built as ``cls(config, tool_schema)`` and then has ``tool_schema``. Each is made once per process and shared.
Does not check a class further; the toolbox does, in every rollout process before training starts.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from streamrl.config import plugins
from streamrl.config.paths import resolve
from streamrl.config.tools import FUNCTION_KEY, KEY, Tool, check_names_differ, check_schema, read_tools
from streamrl.errors import ConfigError

GROUP = "streamrl.tools"  # entry points, by a class_name without a dot


class LoadedTool(msgspec.Struct, frozen=True):
    """``target`` is the decorated function or the object of the class; ``where`` begins an error message about it."""

    name: str
    schema: dict[str, Any]
    target: Any
    where: str


@cache
def load_tools(tool_config_path: str | None, function_tool_path: str | None) -> tuple[LoadedTool, ...]:
    """All tools of a run, those of the YAML file first. ConfigError with the key for what cannot be loaded or has the name of another tool."""
    listed = [_listed(tool, tool_config_path) for tool in read_tools(tool_config_path)] if tool_config_path else []
    functions = _functions(function_tool_path) if function_tool_path else []
    check_names_differ([tool.name for tool in listed], KEY, str(tool_config_path))
    check_names_differ([tool.name for tool in functions], FUNCTION_KEY, str(function_tool_path))
    check_names_differ([tool.name for tool in (*listed, *functions)], FUNCTION_KEY, f"{tool_config_path} and {function_tool_path}")
    return (*listed, *functions)


def _listed(tool: Tool, path: str) -> LoadedTool:
    where = f"{KEY}: {path}, {tool.class_name}"
    target = _find(tool.class_name, where)
    schema: Any
    if inspect.isclass(target):
        target = _run(lambda: target(tool.config, tool.tool_schema), f"{where} must be a class that is made from (config, tool_schema)")
        schema = getattr(target, "tool_schema", None)
    elif hasattr(target, "__tool_schema__"):
        schema = tool.tool_schema or target.__tool_schema__
    else:
        raise ConfigError(f"{where} must be a tool class or a function decorated by @tool, got {type(target).__name__}; correct class_name")
    check_schema(schema, KEY, f"{path}, the schema of {tool.class_name}")
    return LoadedTool(schema["function"]["name"], schema, target, where)


def _find(class_name: str, where: str) -> Any:
    module_name, _, name = class_name.rpartition(".")
    if not module_name:
        check_entry_point(name, where)
        return plugins.load(GROUP, name)
    module = _run(lambda: importlib.import_module(module_name), f"{where} must be importable")
    if not hasattr(module, name):
        raise ConfigError(f"{where} must exist, got a module {module_name} without {name!r}; correct class_name")
    return getattr(module, name)


def check_entry_point(name: str, where: str) -> None:
    """ConfigError for a class_name without a dot that no package brings, or two; imports nobody's code."""
    if name not in plugins.names(GROUP):
        known = ", ".join(sorted(plugins.names(GROUP))) or "none"
        raise ConfigError(f"{where} must be package.module.Class, or an entry point of {GROUP} (installed: {known}); correct class_name")
    plugins.check(GROUP, name)


def _functions(path: str) -> list[LoadedTool]:
    """The decorated functions of a file, also those it imports, in the order of their first binding."""
    module = _load_file(path)
    marked = {id(value): value for value in vars(module).values() if inspect.isfunction(value) and hasattr(value, "__tool_schema__")}
    if not marked:
        raise ConfigError(f"{FUNCTION_KEY}: {path} has at least one function decorated by @tool, got none; decorate one")
    return [_function(function, path) for function in marked.values()]


def _function(function: Any, path: str) -> LoadedTool:
    schema = function.__tool_schema__
    check_schema(schema, FUNCTION_KEY, f"{path}, the schema of {function.__name__}")
    return LoadedTool(schema["function"]["name"], schema, function, f"{FUNCTION_KEY}: {path}, {function.__name__}")


@cache
def _load_file(path: str) -> ModuleType:
    """The module of a file, under a name of its own: no import can collide with it."""
    file = Path(resolve(path))
    name = f"streamrl_tools_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError(f"{FUNCTION_KEY}: an existing Python file that ends in .py, got {path}; correct the path")
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    sys.modules[name] = module  # dataclasses and pickle look there
    try:
        _run(lambda: loader.exec_module(module), f"{FUNCTION_KEY}: {path} must be loadable")
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _run(call: Callable[[], Any], rule: str) -> Any:
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code raises anything; SystemExit would end the process without a word
        raise ConfigError(f"{rule}, got {type(error).__name__}: {error}; correct it") from error

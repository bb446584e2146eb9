"""Function tools: ``@tool`` gives a plain function its schema; the toolbox makes a tool of it.

    @tool
    def calculator(expression: str) -> str:
        \"\"\"Evaluates an expression.

        Args:
            expression: Whole numbers, + - * // % and parentheses.
        \"\"\"

The function stays what it was and can be called and tested as such. Async functions run in the event loop, others in threads (``threads.py``).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, overload

from streamrl.rollout.tools.base import AgentData, BaseTool, ToolResponse
from streamrl.rollout.tools.hints import describe
from streamrl.rollout.tools.results import as_result
from streamrl.rollout.tools.threads import ToolThreads

F = TypeVar("F", bound=Callable[..., Any])

_PLACES: dict[tuple[str, str, str], tuple[str, int]] = {}  # (module, scope, tool name) -> (file, line)


@overload
def tool(function: F) -> F: ...
@overload
def tool(*, name: str | None = None, description: str | None = None) -> Callable[[F], F]: ...
def tool(function: Any = None, *, name: str | None = None, description: str | None = None) -> Any:
    """Decorator: the model may call this function. Name and description are the function's own unless given here.

    ValueError for a function that has no schema (``hints.py``), and for a second function of the same name in the same module.
    """
    if function is None:
        return functools.partial(tool, name=name, description=description)
    if not inspect.isfunction(function):
        raise ValueError(f"@tool decorates a function, got {type(function).__name__}; a class derives from BaseTool and is listed in the tool file")
    called = name or function.__name__
    schema, arguments = describe(function, called, description)
    _claim(function, called)
    function.__tool_schema__ = schema  # type: ignore[attr-defined]
    function.__tool_arguments__ = arguments  # type: ignore[attr-defined]
    return function


def _claim(function: Any, name: str) -> None:
    place = function.__code__.co_filename, function.__code__.co_firstlineno
    file, line = _PLACES.setdefault((function.__module__, function.__qualname__.rpartition(".")[0], name), place)
    if file == place[0] and line != place[1]:
        raise ValueError(f"a tool's name stands for one function, got a second one for {name!r} (lines {line} and {place[1]} of {file}); rename one")


class FunctionTool(BaseTool):
    """A decorated function with the life cycle of a class. Returns of the function: see ``results.py``."""

    def __init__(self, function: Callable[..., Any], tool_schema: dict[str, Any], threads: ToolThreads) -> None:
        super().__init__({}, tool_schema)
        self._function = function
        self._threads = threads

    async def execute(self, instance_id: str, parameters: dict[str, Any], *, agent_data: AgentData) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        if inspect.iscoroutinefunction(self._function):
            return as_result(await self._function(**parameters))
        return await self._threads.run(lambda: as_result(self._function(**parameters)))

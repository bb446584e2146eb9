"""Makes the agent loop of one session: which class a row asks for, and everything such a loop is given."""

from __future__ import annotations

import inspect
from typing import Any

from streamrl.config.data import DataConfig
from streamrl.config.rollout import RolloutConfig, default_agent_loop
from streamrl.errors import ConfigError
from streamrl.protocol.chat import ChatTokenizer
from streamrl.protocol.interfaces import Clock, Generate
from streamrl.rollout import endpoint, single_turn, tool_agent  # noqa: F401  (registers the loops that ship)
from streamrl.rollout.base import AgentLoopBase
from streamrl.rollout.interactions import load_interactions
from streamrl.rollout.registry import KEY, agent_loop, check_agent_names, known_loops, read_loops
from streamrl.rollout.tools import load_toolbox


class AgentLoops:
    """Loops of one process. Tools and interactions are loaded once and shared by all sessions; the loop itself is new each time."""

    def __init__(self, *, rollout: RolloutConfig, data: DataConfig, tokenizer: ChatTokenizer, generate: Generate, clock: Clock) -> None:
        self._shared: dict[str, Any] = {
            "rollout": rollout,
            "data": data,
            "tokenizer": tokenizer,
            "generate": generate,
            "tools": load_toolbox(data, rollout),
            "interactions": load_interactions(rollout.multi_turn.interaction_config_path),
            "clock": clock,
        }
        self._default = default_agent_loop(rollout)
        self._file = rollout.agent.agent_loop_config_path if rollout.agent else None
        self._ready: dict[str, type[AgentLoopBase]] = {}
        check_agent_names([self._default], self._file)
        for name in (self._default, *read_loops(self._file)):
            self._class(name)

    def build(self, row: dict[str, Any], request_id: str) -> AgentLoopBase:
        """A fresh loop for ``row``. ConfigError for a name that nobody registered."""
        cls, kwargs = self._class(self.name_of(row))
        return cls(**self._shared, request_id=request_id, **kwargs)

    def knows(self, row: dict[str, Any]) -> bool:
        return self.name_of(row) in known_loops(self._file)

    def name_of(self, row: dict[str, Any]) -> str:
        """The loop that ``row`` asks for."""
        return str(row.get("agent_name") or self._default)

    async def close(self) -> None:
        """End what the classes share, such as the endpoint of black-box agents."""
        for cls in set(self._ready.values()):
            await cls.close_class()

    def _class(self, name: str) -> tuple[type[AgentLoopBase], dict[str, Any]]:
        cls, kwargs = agent_loop(name, self._file)
        if name not in self._ready:
            _check_arguments(name, cls, {**self._shared, "request_id": "", **kwargs})
            cls.init_class(**{key: self._shared[key] for key in ("rollout", "data", "tokenizer", "tools")}, **kwargs)
            self._ready[name] = cls
        return cls, kwargs


def _check_arguments(name: str, cls: type[AgentLoopBase], arguments: dict[str, Any]) -> None:
    try:
        calls = [inspect.signature(ancestor.__init__) for ancestor in cls.__mro__ if "__init__" in vars(ancestor) and ancestor is not object]
        takes = {parameter.name for call in calls for parameter in call.parameters.values()}
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{KEY}: kwargs of {name} are arguments of {cls.__qualname__}.__init__, got {error}; correct the entry") from error
    unknown = sorted(arguments.keys() - takes)
    if unknown:
        raise ConfigError(f"{KEY}: kwargs of {name} are arguments of {cls.__qualname__}.__init__, got {', '.join(unknown)}; correct the entry")

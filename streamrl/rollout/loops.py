"""Makes the agent loop of one session: which class a row asks for, and everything such a loop is given."""

from __future__ import annotations

from typing import Any

from streamrl.config.data import DataConfig
from streamrl.config.rollout import RolloutConfig, default_agent_loop
from streamrl.protocol.chat import ChatTokenizer
from streamrl.protocol.interfaces import Clock, Generate
from streamrl.rollout import endpoint, single_turn, tool_agent  # noqa: F401  (registers the loops that ship)
from streamrl.rollout.base import AgentLoopBase
from streamrl.rollout.interactions import load_interactions
from streamrl.rollout.registry import agent_loop, check_agent_names, known_loops, read_loops
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
        cls, kwargs = self._class(row.get("agent_name") or self._default)
        return cls(**self._shared, request_id=request_id, **kwargs)

    def knows(self, row: dict[str, Any]) -> bool:
        return (row.get("agent_name") or self._default) in known_loops(self._file)

    async def close(self) -> None:
        """End what the classes share, such as the endpoint of black-box agents."""
        for cls in set(self._ready.values()):
            await cls.close_class()

    def _class(self, name: str) -> tuple[type[AgentLoopBase], dict[str, Any]]:
        cls, kwargs = agent_loop(name, self._file)
        if name not in self._ready:
            cls.init_class(**{key: self._shared[key] for key in ("rollout", "data", "tokenizer", "tools")}, **kwargs)
            self._ready[name] = cls
        return cls, kwargs

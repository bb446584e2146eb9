"""What a tool is: a class with a life cycle, or a function wrapped into one. Needs no engine and no tokenizer."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from streamrl.errors import ConfigError

ResponseOutcome = Literal["ok", "error", "timeout"]


class ToolResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What the model gets to see. Lists stay None when a tool has no such output; a video is refused by whoever would render it.
    ``outcome``: for the metrics, of a tool that tells the model of a failure in its own words."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None
    outcome: ResponseOutcome = "ok"

    def __post_init__(self) -> None:
        for name in ("image", "video"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, list):
                raise ValueError(f"{name} of a tool response is a list, got {type(value).__name__}; wrap it in a list")
        if self.outcome not in get_args(ResponseOutcome):
            raise ValueError(f"the outcome of a tool response is {', '.join(get_args(ResponseOutcome))}, got {self.outcome!r:.80}; correct it")


class AgentData(msgspec.Struct):
    """What a tool may read of its session. ``state`` is the tools' own, shared within the session."""

    request_id: str
    messages: list[dict[str, Any]]
    row: dict[str, Any]
    state: dict[str, Any] = {}


class BaseTool:
    """Base of class tools. One object serves all sessions of a process, many at once: what belongs to one session is kept under its ``instance_id``.

    create → execute, any number of times → calc_reward, if the class defines it → release, exactly once for each create, whatever happened.
    """

    def __init__(self, config: dict[str, Any], tool_schema: dict[str, Any] | None = None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.schema()

    def schema(self) -> dict[str, Any]:
        """OpenAI function schema, for a tool whose configuration declares none."""
        raise ConfigError(f"a tool has a schema, got none for {type(self).__qualname__}; write tool_schema in the tool file or define schema()")

    @property
    def name(self) -> str:
        return self.tool_schema["function"]["name"]

    async def create(self, instance_id: str, **create_kwargs: Any) -> None:
        """Begin a session; the arguments are the row's ``extra_info.tools_kwargs[name].create_kwargs``."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], *, agent_data: AgentData) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """(what the model sees, reward of this call or None, numbers for the metrics)."""
        raise NotImplementedError

    async def calc_reward(self, instance_id: str) -> float:
        """Called once at the session's end, if the class overrides it; joins ``tool_rewards``."""
        return 0.0

    async def release(self, instance_id: str) -> None:
        """End a session."""

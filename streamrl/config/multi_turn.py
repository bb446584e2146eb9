"""Section ``rollout.multi_turn``: tools, interactions and the limits of a conversation."""

from __future__ import annotations

from typing import Literal

from streamrl.config.base import Positive, Section


class MultiTurnConfig(Section, frozen=True):
    """Names are verl's, but for the tool response's limit, which counts tokens here."""

    enable: bool = False  # rows that name no agent loop run in tool_agent, unless rollout.agent.default_agent_loop says otherwise
    max_assistant_turns: Positive | None = None  # None: no limit but the session's deadline and budget
    max_user_turns: Positive | None = None  # tool turns and interaction turns
    max_parallel_calls: Positive = 1  # calls of one answer that run; further ones get a message that they were skipped
    max_tool_response_tokens: Positive = 512
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"  # which part of a long response goes
    format: str = "hermes"  # of tool calls, see streamrl.rollout.parsers
    tool_config_path: str | None = None  # YAML list of class tools; another name of data.tool_config_path
    function_tool_path: str | None = None  # Python file with functions decorated by @tool; another name of data.function_tool_path
    interaction_config_path: str | None = None  # YAML list of interactions

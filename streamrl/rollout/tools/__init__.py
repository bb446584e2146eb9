"""Tools: classes or decorated functions that a model may call."""

from streamrl.rollout.tools.base import AgentData, BaseTool, ToolResponse
from streamrl.rollout.tools.function import tool
from streamrl.rollout.tools.session import ToolResult, ToolSession
from streamrl.rollout.tools.toolbox import ToolBox, load_toolbox
from streamrl.rollout.tools.truncate import truncated

__all__ = ["AgentData", "BaseTool", "ToolBox", "ToolResponse", "ToolResult", "ToolSession", "load_toolbox", "tool", "truncated"]

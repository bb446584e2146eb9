"""Tools, sessions and files that the tests of tools share."""

import asyncio
import textwrap

from streamrl.protocol.clock import SystemClock
from streamrl.rollout.parsers.base import ToolCall
from streamrl.rollout.tools import AgentData, BaseTool, ToolResponse, ToolSession
from streamrl.rollout.tools.arguments import by_hints, by_schema
from streamrl.rollout.tools.function import FunctionTool
from streamrl.rollout.tools.threads import ToolThreads
from streamrl.rollout.tools.toolbox import ReadyTool


def schema(name, **properties):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties, "required": list(properties)}}}


class Recorder(BaseTool):
    """Keeps what was done with it; ``act`` is called for execute, ``fail`` names methods that raise."""

    def __init__(self, name="recorder", act=None, fail=(), **properties):
        super().__init__({}, schema(name, **properties))
        self.log = []
        self.act = act
        self.fail = fail

    async def create(self, instance_id, **kwargs):
        self._note("create", instance_id, kwargs)

    async def execute(self, instance_id, parameters, *, agent_data):
        self._note("execute", instance_id, parameters)
        return (await self.act(parameters)) if self.act else (ToolResponse(text="done"), None, {})

    async def release(self, instance_id):
        self._note("release", instance_id, None)

    def _note(self, what, instance_id, given):
        self.log.append((what, instance_id, given))
        if what in self.fail:
            raise ValueError(f"{what} failed")

    @property
    def done(self):
        return [what for what, _, _ in self.log]


def ready(tool, threads=None):
    """A BaseTool, or a function decorated by @tool."""
    if isinstance(tool, BaseTool):
        return ReadyTool(tool, by_schema(tool.tool_schema, "here"))
    return ReadyTool(FunctionTool(tool, tool.__tool_schema__, threads or ToolThreads()), by_hints(tool.__tool_arguments__))


def session(*tools, threads=None, timeout_s=5.0, max_parallel_calls=3, clock=None, **tools_kwargs):
    made = [ready(tool, threads) for tool in tools]
    return ToolSession(
        {each.tool.name: each for each in made},
        tools_kwargs=tools_kwargs,
        agent_data=AgentData("r", [], {}),
        timeout_s=timeout_s,
        max_parallel_calls=max_parallel_calls,
        clock=clock or SystemClock(),
    )


def call(name, arguments="{}", error=None):
    return ToolCall(name, arguments, error)


def results(a_session, *calls):
    """Of one turn, then the session is closed."""

    async def run():
        found = await a_session.call(calls)
        await a_session.close()
        return found

    return asyncio.run(run())


def write(path, text):
    path.write_text(textwrap.dedent(text))
    return str(path)

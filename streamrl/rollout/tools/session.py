"""The tools of one session: runs the model's calls within their limits, and ends what it began.

Guarantees one result per call, in the order of the calls; that nothing a model wrote or a tool did raises into the agent loop; and exactly one
``release`` for each ``create`` that was begun. Texts are not yet cut to tokens. Can't stop code that ignores its cancellation or holds the event
loop: an async tool that computes for long belongs into a thread or a process.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from streamrl.errors import WaitTimeout
from streamrl.protocol.deadline import within
from streamrl.protocol.interfaces import Clock
from streamrl.protocol.waits import shown
from streamrl.rollout.contain import contained
from streamrl.rollout.parsers.base import ToolCall
from streamrl.rollout.session_metrics import ToolTime
from streamrl.rollout.tools.arguments import BadArguments, parse
from streamrl.rollout.tools.base import AgentData, BaseTool
from streamrl.rollout.tools.results import as_result, as_reward, error_text, short

if TYPE_CHECKING:
    from streamrl.rollout.tools.toolbox import ReadyTool

log = logging.getLogger(__name__)

REWARD_S = 1.5  # for the calc_reward of all tools of a session
RELEASE_S = 2.5  # for their release; together below the 5 s that a cancelled session may take
NO_TOOL = "unknown"  # in the metrics, for names that no tool has: what a model writes must not become a label

Outcome = Literal["ok", "error", "timeout", "skipped", "unknown", "malformed"]
_seen_errors: set[tuple[str, type[BaseException]]] = set()  # logged with a traceback already, in this process


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a call led to. ``text`` is what the model sees; ``reward`` None: the tool gave none, or the call was skipped."""

    text: str
    outcome: Outcome
    reward: float | None = 0.0
    metrics: dict[str, Any] = {}
    image: list[Any] | None = None


class _Instance:
    """A tool's life in this session."""

    def __init__(self, tool: BaseTool) -> None:
        self.tool = tool
        self.id = uuid.uuid4().hex
        self.created: asyncio.Task[None] | None = None  # several calls may wait for one create


class ToolSession:
    """``times``: outcomes and seconds per tool, "reward_failed" and "release_failed" of :meth:`close` among the outcomes."""

    def __init__(
        self,
        tools: dict[str, ReadyTool],
        *,
        tools_kwargs: dict[str, Any],
        agent_data: AgentData,
        timeout_s: float,
        max_parallel_calls: int,
        clock: Clock,
    ) -> None:
        self.seconds = 0.0  # of all calls, those at the same time added up
        self.outcomes: Counter[str] = Counter()
        self.times: dict[str, ToolTime] = {}
        self._tools = tools
        self._tools_kwargs = tools_kwargs
        self._agent_data = agent_data
        self._timeout_s = timeout_s
        self._max_parallel_calls = max_parallel_calls
        self._clock = clock
        self._instances: dict[str, _Instance] = {}
        self._closed = False

    async def call(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """One result per call, in call order: the first ``max_parallel_calls`` run side by side, the others are skipped."""
        assert not self._closed, "a closed session runs no tools"
        run, skipped = calls[: self._max_parallel_calls], calls[self._max_parallel_calls :]
        results = await asyncio.gather(*(self._timed(call) for call in run))
        return [*results, *(self._skip(call) for call in skipped)]

    async def close(self) -> list[float]:
        """The rewards of the tools that have one for the whole session; then every tool is released. Ends within 5 s; errors are counted and logged."""
        if self._closed:
            return []
        self._closed = True
        instances = list(self._instances.values())
        for instance in instances:
            if instance.created and not instance.created.done():
                instance.created.cancel()
        rewards = await asyncio.gather(*(self._final_reward(instance) for instance in instances))
        await asyncio.gather(*(self._settle(instance, "release", instance.tool.release, RELEASE_S) for instance in instances))
        return [reward for reward in rewards if reward is not None]

    def _skip(self, call: ToolCall) -> ToolResult:
        self._count(call.name, "skipped")
        limit = self._max_parallel_calls
        return ToolResult(text=f"Error: this call was skipped: at most {limit} of one answer run; call again", outcome="skipped", reward=None)

    async def _timed(self, call: ToolCall) -> ToolResult:
        began = self._clock.now()
        result = await self._answer(call)
        seconds = self._clock.now() - began
        self.seconds += seconds
        self._count(call.name, result.outcome).seconds.append(seconds)
        return result

    def _count(self, name: str, outcome: str) -> ToolTime:
        self.outcomes[outcome] += 1
        times = self.times.setdefault(name if name in self._tools else NO_TOOL, ToolTime())
        times.outcomes[outcome] += 1
        return times

    async def _answer(self, call: ToolCall) -> ToolResult:
        if call.error is not None:
            return ToolResult(text=short(f"Error: {call.error}"), outcome="malformed")
        ready = self._tools.get(call.name)
        if ready is None:
            return ToolResult(text=short(f"Error: there is no tool {call.name!r:.80}; known: {', '.join(self._tools) or 'none'}"), outcome="unknown")
        try:
            arguments = ready.check(parse(call.arguments))
        except BadArguments as error:
            return ToolResult(text=str(error), outcome="malformed")
        except RecursionError:
            return ToolResult(text="Error: the arguments are nested too deeply", outcome="malformed")
        return await self._run(ready.tool, call.name, arguments)

    async def _run(self, tool: BaseTool, name: str, arguments: dict[str, Any]) -> ToolResult:
        try:
            with shown("a call", f"tool {name}", self._timeout_s):
                response, reward, metrics = await self._limited(self._execute(tool, name, arguments), self._timeout_s, f"a call of {name}")
        except WaitTimeout:
            return ToolResult(text=f"Error: {name} gave no result within {self._timeout_s:g} s", outcome="timeout")
        except Exception as error:  # tools are user code
            _log(name, error)
            return ToolResult(text=error_text(error), outcome="timeout" if isinstance(error, TimeoutError) else "error")
        return ToolResult(text=response.text or "", outcome=response.outcome, reward=reward, metrics=metrics, image=response.image)

    async def _execute(self, tool: BaseTool, name: str, arguments: dict[str, Any]) -> Any:
        instance = self._instances.get(name)
        if instance is None:
            instance = self._instances[name] = _Instance(tool)
            instance.created = asyncio.create_task(self._limited(self._create(instance, name), self._timeout_s, f"create of {name}"))
            instance.created.add_done_callback(_look_at)
        assert instance.created is not None
        await asyncio.shield(instance.created)
        return as_result(await tool.execute(instance.id, arguments, agent_data=self._agent_data))

    async def _create(self, instance: _Instance, name: str) -> None:
        given = self._tools_kwargs.get(name) or {}
        await instance.tool.create(instance.id, **(given.get("create_kwargs") or {}))

    async def _final_reward(self, instance: _Instance) -> float | None:
        if type(instance.tool).calc_reward is BaseTool.calc_reward:
            return None
        return await self._settle(instance, "reward", lambda id: _reward_of(instance.tool.calc_reward(id)), REWARD_S)

    async def _settle(self, instance: _Instance, kind: str, call: Any, seconds: float) -> Any:
        """The result of ``call``; None when it failed or took too long, which is counted."""
        name = instance.tool.name
        try:
            return await self._limited(call(instance.id), seconds, f"the {kind} of {name}")
        except Exception as error:  # tools are user code
            _log(name, error)
            self.times.setdefault(name, ToolTime()).outcomes[f"{kind}_failed"] += 1
            return None

    async def _limited(self, awaitable: Awaitable[Any], seconds: float, what: str) -> Any:
        """Contained twice: as a task of its own, and where the outcome of that task arrives, which may have cancelled itself."""
        return await contained(within(contained(awaitable), seconds, what, self._clock))


async def _reward_of(awaitable: Awaitable[Any]) -> float | None:
    return as_reward(await awaitable)


def _look_at(task: asyncio.Task[None]) -> None:
    """Fetch how a create ended, so that asyncio does not report it as forgotten when all its callers ran out of time."""
    if not task.cancelled():
        task.exception()


def _log(name: str, error: BaseException) -> None:
    """The traceback once for each tool and kind of error; after that one line."""
    key = (name, type(error))
    if key in _seen_errors:
        log.info("tool %s raised %s again", name, type(error).__name__)
        return
    _seen_errors.add(key)
    log.warning("tool %s raised %s", name, type(error).__name__, exc_info=error)

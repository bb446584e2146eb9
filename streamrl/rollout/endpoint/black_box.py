"""The agent loop for agents that know nothing of streamrl: they call an OpenAI-compatible endpoint, the tokens are recorded behind it.

    - name: my_agent                                          # rollout.agent.agent_loop_config_path
      class_path: streamrl.rollout.endpoint.BlackBoxAgentLoop
      kwargs: {agent: "my_package.agents:solve"}              # or "path/to/file.py:solve", or {command: [python, agent.py]}

The agent brings its own tools and its own stop; the run's budgets and deadlines hold. An agent that stops because it was told that a budget is used
up has ended like any other session; one that raises for another reason has failed.
"""

from __future__ import annotations

import asyncio
import shutil
from typing import Any

from msgspec.structs import replace

from streamrl.config.data import DataConfig
from streamrl.config.rollout import RolloutConfig
from streamrl.errors import ConfigError, SessionFailed
from streamrl.protocol.chat import ChatTokenizer
from streamrl.protocol.generate import SamplingParams
from streamrl.rollout import parsers
from streamrl.rollout.base import AgentLoopBase, AgentLoopOutput
from streamrl.rollout.contain import contained, words
from streamrl.rollout.endpoint.agents import AgentResult, run_command, run_function
from streamrl.rollout.endpoint.conversation import Parts
from streamrl.rollout.endpoint.session import EndpointSession
from streamrl.rollout.locate import locate
from streamrl.rollout.registry import KEY, register_agent_loop
from streamrl.rollout.tools import ToolBox
from streamrl.rollout.turns import TurnEncoder


@register_agent_loop("black_box_agent")
class BlackBoxAgentLoop(AgentLoopBase):
    """One session: one key of the endpoint, one run of the agent, a row for each conversation it had."""

    def __init__(self, *, agent: str | None = None, command: list[str] | None = None, **parts: Any) -> None:
        super().__init__(**parts)
        self._function = _function(agent, command)
        self._command = command
        self._session: EndpointSession | None = None

    @classmethod
    def init_class(cls, *, rollout: RolloutConfig, data: DataConfig, tokenizer: ChatTokenizer, tools: ToolBox, **kwargs: Any) -> None:
        """The agent must be there, and the template able to render what agents append."""
        _function(kwargs.get("agent"), kwargs.get("command"))
        _check_command(kwargs.get("command"))
        parsers.get(rollout.multi_turn.format)(tokenizer)
        TurnEncoder(tokenizer, data.apply_chat_template_kwargs, None).check()

    async def run(self, sampling: SamplingParams, **row: Any) -> list[AgentLoopOutput]:
        from streamrl.rollout.endpoint.server import endpoint  # aiohttp: a third of a second that other loops need not pay

        self._session = EndpointSession(self._parts(sampling), self._training(sampling))
        async with endpoint().open(self._session) as access:
            result = await self._result(asyncio.ensure_future(contained(self._agent(access.base_url, access.api_key, row))), self._session)
        outputs = self._session.outputs()
        if not outputs and self._session.refused == "overlong":
            raise SessionFailed("an agent's first messages fit data.max_prompt_length, got more tokens; shorten them", reason="overlong", retryable=False)
        for output in outputs:
            output.reward_score = result.reward
            output.extra_fields |= {"turn_scores": list(result.turn_scores), "tool_rewards": list(result.tool_rewards)}
        return outputs

    def partial(self) -> AgentLoopOutput | None:
        outputs = self._session.outputs("session_timeout") if self._session is not None else []
        return outputs[-1] if outputs else None

    async def _agent(self, base_url: str, api_key: str, row: dict[str, Any]) -> AgentResult:
        if self._command is not None:
            return await run_command(self._command, base_url, api_key, row)
        assert self._function is not None
        return await run_function(self._function, base_url, api_key, row)

    async def _result(self, agent: asyncio.Task[AgentResult], session: EndpointSession) -> AgentResult:
        """What the agent returned. It is cancelled, and not waited for, when the session fails behind it or is cancelled."""
        try:
            either: set[asyncio.Future[Any]] = {agent, session.failure}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if session.failure.done():
                session.failure.result()
            if agent.cancelled():
                raise SessionFailed("an agent ends by itself, got one that cancelled itself; correct it", reason="loop_error")
            return agent.result()
        except SessionFailed:
            raise
        except Exception as error:
            if session.failure.done() or not agent.done():
                raise
            if session.refused is not None:
                return AgentResult()
            raise SessionFailed(f"the agent raised {type(error).__name__}: {words(error)}", reason="loop_error") from error
        finally:
            if not agent.done():
                agent.add_done_callback(_look_at)
                agent.cancel()

    def _training(self, sampling: SamplingParams) -> SamplingParams:
        run = self.rollout
        return replace(sampling, temperature=run.temperature, top_p=run.top_p, top_k=run.top_k, repetition_penalty=run.repetition_penalty)

    def _parts(self, sampling: SamplingParams) -> Parts:
        return Parts(
            rollout=self.rollout,
            data=self.data,
            tokenizer=self.tokenizer,
            parser=parsers.get(self.rollout.multi_turn.format)(self.tokenizer),
            generate=self.generate,
            clock=self.clock,
            request_id=self.request_id,
            sampling=sampling,
            metrics=self.metrics,
        )


def _function(agent: str | None, command: list[str] | None) -> Any:
    """The agent's function, None for a command; ConfigError for neither, both, or a path that leads nowhere."""
    if (agent is None) == (command is None):
        raise ConfigError(f"{KEY}: a black box is an agent (module:function) or a command, got {agent!r} and {command!r}; declare a loop with one of them")
    return locate(agent, f"{KEY}: agent") if agent is not None else None


def _check_command(command: Any) -> None:
    """ConfigError for what can't be started."""
    if command is None:
        return
    if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
        raise ConfigError(f"{KEY}: the command of a black box is a list of words, each a text, got {command!r:.80}; write [program, argument, ...]")
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{KEY}: the command of a black box begins with a program that exists, got {command[0]!r:.80}; correct it or set PATH")


def _look_at(task: asyncio.Task[AgentResult]) -> None:
    """Fetch the outcome that nobody awaits any more, so that asyncio does not report it as forgotten."""
    if not task.cancelled():
        task.exception()

"""The tool agent loop: the model writes, its calls run or the environment answers, the model goes on.

    PENDING ──► GENERATING ──► PROCESSING_TOOLS ──► GENERATING …
                          └──► INTERACTING ───────► GENERATING …
                          └──► TERMINATED (length, max_assistant_turns, max_user_turns, tool_budget, interaction_end, or as the model ended)

Guarantees: what the model wrote stays as its ids; calls of an answer that was cut off are never run; every tool that was created is released and
every interaction finalized, whatever ends the session. Without tools and interaction it is the single-turn loop.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from msgspec.structs import replace

from streamrl.config.data import DataConfig
from streamrl.config.rollout import RolloutConfig
from streamrl.protocol.chat import ChatTokenizer
from streamrl.protocol.generate import GenerateRequest, SamplingParams
from streamrl.rollout import parsers
from streamrl.rollout.base import AgentLoopBase, AgentLoopOutput
from streamrl.rollout.chat import fit_prompt
from streamrl.rollout.interactions import InteractionSession
from streamrl.rollout.parsers.base import Parsed
from streamrl.rollout.registry import register_agent_loop
from streamrl.rollout.tools import AgentData, ToolBox, ToolResult, ToolSession, truncated
from streamrl.rollout.transcript import Transcript
from streamrl.rollout.turns import TurnEncoder

END_S = 5.0


@register_agent_loop("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """One session. ``messages`` are for reading (tools, interactions, templates of observations); the transcript is what is trained."""

    _endings: ClassVar[set[asyncio.Future[None]]] = set()

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.limits = self.rollout.multi_turn
        self.parser = parsers.get(self.limits.format)(self.tokenizer)
        self.messages: list[dict[str, Any]] = []
        self.transcript: Transcript | None = None
        self.session_tools: ToolSession | None = None
        self.interaction: InteractionSession | None = None
        self.environment_score: float | None = None
        self.turn_scores: list[float] = []
        self.turn_ends: list[int] = []
        self.tool_rewards: list[float] = []
        self.assistant_turns = self.user_turns = 0

    @classmethod
    def init_class(cls, *, rollout: RolloutConfig, data: DataConfig, tokenizer: ChatTokenizer, tools: ToolBox, **kwargs: Any) -> None:
        """The template must be able to render what the loop appends."""
        parsers.get(rollout.multi_turn.format)(tokenizer)
        TurnEncoder(tokenizer, data.apply_chat_template_kwargs, tools.schemas(None)).check()

    @classmethod
    async def close_class(cls) -> None:
        """Sessions that were cancelled a moment ago still release their tools and finalize their interactions."""
        await asyncio.sleep(0)
        if cls._endings:
            await asyncio.wait(cls._endings, timeout=END_S)

    async def run(self, sampling: SamplingParams, **row: Any) -> AgentLoopOutput:
        self._open(row)
        try:
            if self.interaction is not None:
                await self.interaction.start()
            stop_reason = await self._converse(sampling)
            if self.interaction is not None:
                self.environment_score = await self.interaction.score()
        finally:
            closing = asyncio.ensure_future(self._close())  # a task of its own, so that a second cancellation can't cut it short
            self._endings.add(closing)
            closing.add_done_callback(self._endings.discard)
            await asyncio.shield(closing)
        return self._output(stop_reason)

    def partial(self) -> AgentLoopOutput | None:
        return self._output("session_timeout") if self.transcript is not None and self.assistant_turns else None

    # ---- PENDING ------------------------------------------------------------------------------------------------------------------------

    def _open(self, row: dict[str, Any]) -> None:
        extra_info = row.get("extra_info") or {}
        self.messages = list(row["raw_prompt"])
        self.schemas = self.tools.schemas(extra_info)
        self.turns = TurnEncoder(self.tokenizer, self.data.apply_chat_template_kwargs, self.schemas)
        ids = fit_prompt(self.turns.prompt(self.messages), self.data.max_prompt_length, self.rollout.overlong_prompt)
        self.transcript = Transcript(
            ids,
            response_length=self.data.max_response_length,
            model_len=self.data.max_prompt_length + self.data.max_response_length,
            with_log_probs=self.rollout.calculate_log_probs,
        )
        agent_data = AgentData(self.request_id, self.messages, row)
        self.session_tools = self.tools.session(extra_info, agent_data, self.rollout, self.clock)
        self.interaction = self.interactions.session(extra_info, self.request_id, self.rollout.timeouts.interaction_s, self.clock)

    # ---- GENERATING ---------------------------------------------------------------------------------------------------------------------

    async def _converse(self, sampling: SamplingParams) -> str:
        """Turns until one of them ends the session; why it ended."""
        while True:
            ids, stop_reason = await self._answer(sampling)
            self.assistant_turns += 1
            if stop_reason == "length":
                return "length"
            if self.limits.max_assistant_turns is not None and self.assistant_turns >= self.limits.max_assistant_turns:
                return "max_assistant_turns"
            if self.limits.max_user_turns is not None and self.user_turns >= self.limits.max_user_turns:
                return "max_user_turns"
            parsed = self.parser.parse(ids, self.schemas) if self.schemas else Parsed(self._text(ids))
            ended = await self._react(parsed)
            if ended:
                return stop_reason if ended == "answered" else ended
            self.user_turns += 1

    async def _answer(self, sampling: SamplingParams) -> tuple[list[int], str]:
        """One turn of the model: its ids, and ``length`` only when no room is left. A call that ran into ``max_tokens_per_call`` is followed by another."""
        assert self.transcript is not None
        ids: list[int] = []
        while (room := self.transcript.room(sampling.max_tokens, self.rollout.max_tokens_per_call)) > 0:
            began = self.clock.now()
            seed = None if sampling.seed is None else (sampling.seed + self.transcript.used) % 2**63  # not the random numbers of the turn before
            stops = (*sampling.stop_token_ids, *self.parser.stop_token_ids)
            asked = replace(sampling, max_tokens=room, seed=seed, stop_token_ids=stops)
            result = await self.generate(GenerateRequest(self.request_id, self.transcript.ids, asked))
            self.metrics.generate_s += self.clock.now() - began
            self.metrics.num_calls += 1
            self.transcript.add_model(result)
            ids += result.token_ids
            if result.stop_reason != "length":
                return ids, result.stop_reason
        return ids, "length"

    # ---- PROCESSING_TOOLS, INTERACTING --------------------------------------------------------------------------------------------------

    async def _react(self, parsed: Parsed) -> str | None:
        """Append what answers the model; why the session ends instead, "answered" when there is nothing to wait for."""
        assert self.session_tools is not None and self.transcript is not None
        if parsed.calls:
            results = await self.session_tools.call(parsed.calls)
            self.tool_rewards += [result.reward for result in results if result.reward is not None]
            self.metrics.parse_errors += sum(call.error is not None for call in parsed.calls)
            said, answers = self._tool_messages(parsed, results)
        elif self.interaction is not None:
            said = {"role": "assistant", "content": parsed.content}
            began = self.clock.now()
            turn = await self.interaction.respond([*self.messages, said])
            self.metrics.interaction_s += self.clock.now() - began
            self.turn_scores.append(turn.score)
            self.turn_ends.append(self.transcript.used - 1)
            if turn.should_terminate:
                return "interaction_end"
            answers = [{"role": "user", "content": self.turns.plain(turn.content)}]
        else:
            return "answered"
        return None if self._append(said, answers) else "tool_budget"

    def _append(self, said: dict[str, Any], answers: list[dict[str, Any]]) -> bool:
        """False when the answers leave no room for the model to go on: they are not part of the row then."""
        assert self.transcript is not None
        history = [*self.messages, said]
        ids = self.turns.observation(history, answers, self.transcript.ids)
        if not self.transcript.add_observation(ids):
            return False
        self.messages += [said, *answers]  # in place: tools see this list
        return True

    def _tool_messages(self, parsed: Parsed, results: list[ToolResult]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What the model said, and one tool message for each call, in call order."""
        ids = [f"call{self.assistant_turns:03d}{place:02d}" for place in range(len(results))]  # nine characters: some templates insist
        calls = [
            {"type": "function", "id": id, "function": {"name": call.name, "arguments": call.arguments}} for id, call in zip(ids, parsed.calls, strict=True)
        ]
        said = {"role": "assistant", "content": parsed.content, "tool_calls": calls}
        limit, side = self.limits.max_tool_response_tokens, self.limits.tool_response_truncate_side
        return said, [
            {"role": "tool", "tool_call_id": id, "name": call.name, "content": truncated(self.turns.plain(result.text), limit, side, self.tokenizer)}
            for id, call, result in zip(ids, parsed.calls, results, strict=True)
        ]

    def _text(self, ids: list[int]) -> str:
        """For reading only."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    # ---- TERMINATED ---------------------------------------------------------------------------------------------------------------------

    async def _close(self) -> None:
        """Releases tools and finalizes the interaction, each within its own limit."""
        assert self.session_tools is not None
        self.tool_rewards += await self.session_tools.close()
        self.metrics.tool_s = self.session_tools.seconds
        self.metrics.tools = self.session_tools.times
        if self.interaction is not None:
            await self.interaction.close()

    def _output(self, stop_reason: str) -> AgentLoopOutput:
        transcript, num_turns = self.transcript, self.user_turns + self.assistant_turns + 1
        assert transcript is not None and self.session_tools is not None
        self.metrics.tools = self.session_tools.times  # a session that ran into its deadline is not closed yet
        output = transcript.output(
            stop_reason, num_turns, turn_scores=list(self.turn_scores), tool_rewards=list(self.tool_rewards), tool_outcomes=self.metrics.tool_outcomes()
        )
        output.environment_score, output.turn_ends = self.environment_score, list(self.turn_ends)
        self.metrics.observation_tokens = transcript.num_observation_tokens
        self.metrics.dropped_observation_tokens = transcript.dropped_observation_tokens
        return output

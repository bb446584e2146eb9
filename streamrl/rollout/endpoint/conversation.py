"""One row of a black-box session: a conversation that grows token-exactly, however often the agent sends it again.

The agent sends all messages with each call. When they are what is known here plus new ones, the new ones are encoded and appended; what the model
wrote stays as its ids. Whether a request continues this conversation is decided by :meth:`Conversation.continues`; what happens to one that
continues none, by ``session.py``.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from streamrl.config.data import DataConfig
from streamrl.config.rollout import RolloutConfig
from streamrl.protocol.chat import ChatTokenizer
from streamrl.protocol.generate import GenerateRequest, GenerateResult, SamplingParams
from streamrl.protocol.interfaces import Clock, Generate
from streamrl.rollout.chat import fit_prompt
from streamrl.rollout.endpoint.api import ApiError, ChatRequest, Reply, json_value, message_key, said
from streamrl.rollout.parsers.base import Parsed, ToolParser
from streamrl.rollout.session_metrics import SessionMetrics
from streamrl.rollout.transcript import Transcript
from streamrl.rollout.turns import TurnEncoder

ROW_SEED_STEP = 1 << 40  # apart from all seeds of other rows: two rows that begin alike are two samples


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What all conversations of a session share."""

    rollout: RolloutConfig
    data: DataConfig
    tokenizer: ChatTokenizer
    parser: ToolParser
    generate: Generate
    clock: Clock
    request_id: str
    sampling: SamplingParams
    metrics: SessionMetrics


class Conversation:
    """``messages`` and ``keys`` hold the turns that are encoded, the model's last answer included."""

    def __init__(self, parts: Parts, request: ChatRequest, row: int) -> None:
        self._parts = parts
        self._row = row
        self.tools = request.tools
        self._turns = TurnEncoder(parts.tokenizer, parts.data.apply_chat_template_kwargs, request.tools)
        self.messages, ids = self._prompt(_named(request.messages, []))
        self.keys = list(request.keys)
        self.transcript = Transcript(
            fit_prompt(ids, parts.data.max_prompt_length, parts.rollout.overlong_prompt),
            response_length=parts.data.max_response_length,
            model_len=parts.data.max_prompt_length + parts.data.max_response_length,
            with_log_probs=parts.rollout.calculate_log_probs,
        )
        self.asked = list(request.keys)  # of the newest call, whose answer is ``pending``
        self.pending: asyncio.Task[Reply] | None = None
        self.assistant_turns = self.user_turns = 0
        self.stop_reason = "eos"

    def _prompt(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
        """The messages as the template takes them, and their ids. Most templates want the arguments of a call as an object, some as text."""
        as_objects = [_with_objects(message) for message in messages]
        try:
            return as_objects, self._turns.prompt(as_objects)
        except Exception:  # a template raises whatever its expressions raise
            if as_objects == messages:
                raise
            return messages, self._turns.prompt(messages)

    @property
    def is_busy(self) -> bool:
        return self.pending is not None and not self.pending.done()

    def continues(self, request: ChatRequest) -> bool:
        """Whether the request is what is known here and new turns of others."""
        size = len(self.keys)
        new = request.messages[size:]
        known = self.assistant_turns > 0 and not self.is_busy and self.tools == request.tools and request.keys[:size] == self.keys
        return known and bool(new) and all(message["role"] != "assistant" for message in new)

    def was_asked(self, request: ChatRequest) -> bool:
        """Whether the request is the newest call once more."""
        return self.pending is not None and self.tools == request.tools and self.asked == request.keys

    def extend(self, request: ChatRequest) -> None:
        """Append the new turns. ApiError, and nothing changed, when they would leave no room for an answer."""
        size = len(self.messages)
        new = _named(request.messages[size:], self.messages)
        turns = copy.copy(self._turns)  # it remembers what it encoded: kept only if that is appended
        ids = turns.observation(self.messages, new, self.transcript.ids)
        if not self.transcript.add_observation(ids):
            was_cut = self.stop_reason == "length" and self.transcript.left == 0
            self.stop_reason = "length" if was_cut else "tool_budget"
            self._parts.metrics.dropped_observation_tokens += len(ids)
            raise context_length_exceeded(f"{len(ids)} tokens of new messages leave no room for an answer: {self.transcript.left} tokens are left")
        self._turns = turns
        self._parts.metrics.observation_tokens += len(ids)
        self.messages += new
        self.keys = list(request.keys)
        self.user_turns += 1

    async def answer(self, max_tokens: int | None) -> Reply:
        """The model's next turn."""
        prompt_tokens = len(self.transcript.ids)
        ids, stop_reason = await self._generate(max_tokens)
        self.assistant_turns += 1
        self.stop_reason = stop_reason
        parsed = self._parsed(ids, was_cut=stop_reason == "length")
        message = said(parsed, [f"call{self.assistant_turns:03d}{place:02d}" for place in range(len(parsed.calls))])
        self.messages.append(message)
        self.keys.append(message_key(message))
        finish = "tool_calls" if parsed.calls else "length" if stop_reason == "length" else "stop"
        return Reply(message=message, finish_reason=finish, prompt_tokens=prompt_tokens, completion_tokens=len(ids))

    async def _generate(self, max_tokens: int | None) -> tuple[list[int], str]:
        """Ids of one turn; ``length`` when the agent's limit or the budget cut it. A call that ran into ``max_tokens_per_call`` is followed by another."""
        parts = self._parts
        ids: list[int] = []
        limit = min(max_tokens or parts.sampling.max_tokens, parts.sampling.max_tokens)
        while (room := self.transcript.room(limit - len(ids), parts.rollout.max_tokens_per_call)) > 0:
            result = await self._call(room)
            self.transcript.add_model(result)
            ids += result.token_ids
            if result.stop_reason != "length":
                return ids, result.stop_reason
        return ids, "length"

    async def _call(self, room: int) -> GenerateResult:
        parts, sampling = self._parts, self._parts.sampling
        seed = None if sampling.seed is None else (sampling.seed + self.transcript.used + self._row * ROW_SEED_STEP) % 2**63
        stops = (*sampling.stop_token_ids, *parts.parser.stop_token_ids)
        began = parts.clock.now()
        try:
            asked = replace(sampling, max_tokens=room, seed=seed, stop_token_ids=stops)
            return await parts.generate(GenerateRequest(parts.request_id, self.transcript.ids, asked))
        finally:
            parts.metrics.generate_s += parts.clock.now() - began
            parts.metrics.num_calls += 1

    def _parsed(self, ids: list[int], *, was_cut: bool) -> Parsed:
        """Calls that are not well formed are no calls of the API: an answer with nothing else is shown as the text it is, and so is one that was cut."""
        decode: Callable[..., str] = self._parts.tokenizer.decode
        if not self.tools or was_cut:
            return Parsed(decode(ids, skip_special_tokens=True))
        parsed = self._parts.parser.parse(ids, self.tools)
        good = tuple(call for call in parsed.calls if call.error is None)
        self._parts.metrics.parse_errors += len(parsed.calls) - len(good)
        return Parsed(parsed.content if good or not parsed.calls else decode(ids, skip_special_tokens=True), good)


def context_length_exceeded(message: str) -> ApiError:
    return ApiError(400, f"{message}; end, or begin anew with a shorter history", code="context_length_exceeded", param="messages")


def _named(new: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``new`` with the function's name on each tool message: agents leave it out, templates may print it."""
    names = {call["id"]: call["function"]["name"] for message in [*before, *new] for call in message.get("tool_calls", ())}
    return [{"name": names[message["tool_call_id"]]} | message if message.get("tool_call_id") in names else message for message in new]


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """The message with arguments of calls as objects, where their text is one."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        value = json_value(call["function"]["arguments"])
        function = {**call["function"], "arguments": value} if isinstance(value, dict) else call["function"]
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}

"""A black-box session behind the endpoint: finds the conversation that a request continues, or begins a row.

A request that continues no conversation (a reset or shortened context, a sub-agent, other tools) begins a row of its own; all stay open, so an
agent may go back and forth between them. Rows are ordered by their last answer: the agent's final words are in the last one, which is scored.

Owns what an agent may use up: turns, rows, calls at a time. An engine failure is not the agent's to handle: it ends the session.
"""

from __future__ import annotations

import asyncio

from streamrl.errors import SessionFailed, StreamrlError
from streamrl.protocol.generate import SamplingParams
from streamrl.protocol.spending import counting_for, current
from streamrl.rollout.base import AgentLoopOutput
from streamrl.rollout.endpoint.api import ApiError, ChatRequest, Reply
from streamrl.rollout.endpoint.conversation import Conversation, Parts, context_length_exceeded

MAX_ROWS = 64  # conversations of one session
MAX_CALLS = 16  # calls of one session at a time


class EndpointSession:
    """One key of the endpoint. ``failure`` is set by what ends the session whatever the agent does."""

    def __init__(self, parts: Parts, training_sampling: SamplingParams | None = None) -> None:
        self._parts = parts
        self.allowed = (parts.sampling, training_sampling or parts.sampling)  # agents that spell out the run's temperature work in validation too
        self._conversations: list[Conversation] = []  # by last answer
        self._num_begun = 0
        self._num_calls = 0
        self._spending = current()  # calls arrive in tasks of the server
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.refused: str | None = None  # why the newest call was refused: a budget is used up; None after an answer

    async def complete(self, request: ChatRequest) -> Reply:
        """One call of the agent; ApiError for what it can't have."""
        if self._num_calls >= MAX_CALLS:
            raise ApiError(429, f"a session has at most {MAX_CALLS} calls at a time, got one more", code="too_many_calls", retry=True)
        self._num_calls += 1
        try:
            pending = self._repeated(request) or self._started(request)
            return await _outcome(pending)
        finally:
            self._num_calls -= 1

    def _repeated(self, request: ChatRequest) -> asyncio.Task[Reply] | None:
        """The call that a client makes again, because it did not wait for the answer; a second sample would be a turn that no agent saw."""
        if not request.is_retry:
            return None
        return next((conversation.pending for conversation in self._conversations if conversation.was_asked(request)), None)

    def _started(self, request: ChatRequest) -> asyncio.Task[Reply]:
        try:
            conversation = self._ready(request)
        except ApiError:
            raise
        except StreamrlError as error:
            raise self._failed(error) from error
        except Exception as error:  # templates raise what their expressions raise, for messages in an order they do not know
            raise ApiError(400, f"messages are what the chat template takes, got {type(error).__name__}: {error}", param="messages") from error
        conversation.asked = list(request.keys)
        with counting_for(self._spending):
            conversation.pending = asyncio.create_task(self._answered(conversation, request.max_tokens))
        return conversation.pending

    def _ready(self, request: ChatRequest) -> Conversation:
        """The conversation that the request continues, new turns appended; else one that begins with it."""
        self._check_turns()
        for conversation in sorted(self._conversations, key=lambda one: -len(one.keys)):
            if conversation.continues(request):
                return self._extended(conversation, request)
        return self._begun(request)

    def _extended(self, conversation: Conversation, request: ChatRequest) -> Conversation:
        limit = self._parts.rollout.multi_turn.max_user_turns
        if limit is not None and sum(one.user_turns for one in self._conversations) >= limit:
            raise self._used_up("max_user_turns", limit)
        try:
            conversation.extend(request)
        except ApiError:
            self.refused = conversation.stop_reason
            raise
        return conversation

    def _begun(self, request: ChatRequest) -> Conversation:
        if self._num_begun >= MAX_ROWS:
            raise ApiError(400, f"a session has at most {MAX_ROWS} conversations, got one more; continue one of them", code="too_many_conversations")
        try:
            conversation = Conversation(self._parts, request, self._num_begun)
        except SessionFailed as failure:  # only for its length: an agent can send less
            self.refused = failure.reason
            raise context_length_exceeded(str(failure)) from failure
        self._parts.metrics.context_resets += self._num_begun > 0
        self._num_begun += 1
        self._conversations.append(conversation)
        return conversation

    def _check_turns(self) -> None:
        limit = self._parts.rollout.multi_turn.max_assistant_turns
        if limit is not None and sum(one.assistant_turns + one.is_busy for one in self._conversations) >= limit:
            raise self._used_up("max_assistant_turns", limit)

    def _used_up(self, name: str, limit: int) -> ApiError:
        self.refused = name
        if self._conversations:
            self._conversations[-1].stop_reason = name
        return ApiError(400, f"rollout.multi_turn.{name} is {limit}, got one more turn; end", code=name)

    async def _answered(self, conversation: Conversation, max_tokens: int | None) -> Reply:
        try:
            reply = await conversation.answer(max_tokens)
        except Exception as error:
            raise self._failed(error) from error
        self._conversations.remove(conversation)
        self._conversations.append(conversation)
        self.refused = None
        return reply

    def _failed(self, error: Exception) -> ApiError:
        """Ends the session; the agent gets a word that it need not try again."""
        if not self.failure.done():
            self.failure.set_exception(error)
            self.failure.exception()  # looked at, for nobody may be waiting any more
        return ApiError(500, "the session has failed; end", code="session_failed")

    def close(self) -> None:
        """Cancel the calls under way, which aborts them in the engine."""
        for conversation in self._conversations:
            if conversation.pending is not None:
                conversation.pending.cancel()

    def outputs(self, stop_reason: str | None = None) -> list[AgentLoopOutput]:
        """A row for each conversation in which the model said something."""
        spoken = [one for one in self._conversations if one.transcript.num_model_tokens]
        return [one.transcript.output(stop_reason or one.stop_reason, one.user_turns + one.assistant_turns + 1) for one in spoken]


async def _outcome(pending: asyncio.Task[Reply]) -> Reply:
    """Waiting may end, the call goes on: its client may come back for the answer."""
    try:
        return await asyncio.shield(pending)
    except asyncio.CancelledError:
        if pending.cancelled():
            raise ApiError(410, "the session has ended", code="session_ended") from None
        raise

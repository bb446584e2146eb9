"""A conversation without a model: scripted answers against an interaction, and an interaction that does what its ``mode`` says."""

import asyncio

from streamrl.protocol.clock import SystemClock
from streamrl.rollout.interactions import BaseInteraction, InteractionSession


class Scripted(BaseInteraction):
    """Notes every call; ``answer`` is what generate_response returns, raises or does."""

    def __init__(self, answer=(False, "go on", 0.0, {}), *, start=None, finalize=None):
        super().__init__({"name": "scripted"})
        self.answer, self.start, self.finalize = answer, start, finalize
        self.calls = []

    async def start_interaction(self, instance_id, **kwargs):
        self.calls.append(("start", instance_id, kwargs))
        return await self._do(self.start, instance_id)

    async def generate_response(self, instance_id, messages, **kwargs):
        self.calls.append(("respond", instance_id, kwargs))
        return await self._do(self.answer, None)

    async def finalize_interaction(self, instance_id):
        self.calls.append(("finalize", instance_id, {}))
        await self._do(self.finalize, None)

    async def _do(self, what, default):
        if isinstance(what, BaseException):
            raise what
        if what == "hang":
            await asyncio.Event().wait()
        if what == "swallow":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.Event().wait()  # until the test's event loop ends
        return default if what is None else what

    def count(self, name):
        return sum(call == name for call, *_ in self.calls)


def session_of(interaction, *, instance_id="s1", timeout_s=5.0, clock=None, **kwargs):
    return InteractionSession(interaction, instance_id, kwargs, timeout_s, clock or SystemClock())


async def converse(session, *answers):
    """Every turn of the environment to scripted answers of the model, and the session's score; always closed."""
    messages, turns = [{"role": "user", "content": "begin"}], []
    try:
        await session.start()
        for answer in answers:
            messages.append({"role": "assistant", "content": answer})
            turns.append(await session.respond(messages))
            if turns[-1].should_terminate:
                break
            messages.append({"role": "user", "content": turns[-1].content})
        return turns, await session.score()
    finally:
        await session.close()


def play(interaction, *answers, **kwargs):
    return asyncio.run(converse(session_of(interaction, **kwargs), *answers))

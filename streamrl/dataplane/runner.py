"""Where the steps of a store's verb run, whoever calls: a coroutine of the store's loop, of another loop, or a thread without one.

A verb is one coroutine. Async ones run on the store's loop, and so do the plain ones of a store whose index is reached from there only. Where the
index can be called from any thread (``InThread``) the plain verbs are run to their end by their caller, which then wakes no other thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from streamrl.dataplane.calls import IndexCalls
from streamrl.errors import ProtocolError

T = TypeVar("T")

THREAD_BYTES = 32 << 20  # larger copies leave the event loop, which this much holds up for about 10 ms; a thread that is waited for costs as much

_background: asyncio.AbstractEventLoop | None = None
_guard = threading.Lock()


def background_loop() -> asyncio.AbstractEventLoop:
    """The process's loop for stores that were given none: one for all of them, so that an index they share stays on one thread."""
    global _background
    with _guard:
        if _background is None or _background.is_closed():
            _background = asyncio.new_event_loop()
            threading.Thread(target=_background.run_forever, name="streamrl-store", daemon=True).start()
        return _background


class LoopRunner:
    """``loop`` None: the loop of the first async call, or the background loop when a plain call comes first. ``in_thread``: plain calls have nothing
    to wait for but blocking calls, and run where they are made."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None, in_thread: bool = False) -> None:
        self._loop = loop
        self._in_thread = in_thread

    @property
    def is_here(self) -> bool:
        """Whether the store's loop runs this."""
        return self._loop is not None and _running_loop() is self._loop

    async def here(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await ``coroutine`` on the store's loop."""
        running = asyncio.get_running_loop()
        if self._loop is None or self._loop.is_closed():
            self._loop = running
        if self._loop is running:
            return await coroutine
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Block this thread until ``coroutine`` has run."""
        if not self._in_thread:
            return self.wait_for_loop(coroutine)
        self._check_thread(coroutine)
        try:
            coroutine.send(None)
        except StopIteration as end:
            result: T = end.value
            return result
        coroutine.close()
        raise AssertionError("what runs in its caller's thread never suspends")

    def wait_for_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Block this thread until ``coroutine`` has run on the store's loop."""
        if self._loop is None or self._loop.is_closed():
            self._loop = background_loop()
        self._check_thread(coroutine)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _check_thread(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        if self.is_here:
            coroutine.close()
            raise ProtocolError("the plain verbs block, got a call on the store's own event loop which would wait for itself; await the async_ twin")


class Way(Protocol):
    """What a verb asks of the thread that runs it."""

    index: IndexCalls

    async def on_loop(self, step: Coroutine[Any, Any, T]) -> T:
        """A step that changes which segments there are: those run on the store's loop, whoever needs them."""
        ...

    async def copy(self, num_bytes: int, function: Callable[..., T], *args: Any) -> T:
        """The result of a function that copies this much."""
        ...


class OnLoop:
    """A coroutine among others of the store's loop."""

    def __init__(self, index: IndexCalls) -> None:
        self.index = index

    async def on_loop(self, step: Coroutine[Any, Any, T]) -> T:
        return await step

    async def copy(self, num_bytes: int, function: Callable[..., T], *args: Any) -> T:
        """Large ones run in a thread. A cancelled verb waits for its copy, since the memory may be given to another right after."""
        if num_bytes <= THREAD_BYTES:
            return function(*args)
        copying = asyncio.ensure_future(asyncio.to_thread(function, *args))
        try:
            return await asyncio.shield(copying)
        finally:
            await asyncio.wait([copying])


class InThread:
    """Plain code of the calling thread: the calls of ``index`` block, and nothing suspends."""

    def __init__(self, index: IndexCalls, runner: LoopRunner) -> None:
        self.index = index
        self._runner = runner

    async def on_loop(self, step: Coroutine[Any, Any, T]) -> T:
        return self._runner.wait_for_loop(step)

    async def copy(self, num_bytes: int, function: Callable[..., T], *args: Any) -> T:
        return function(*args)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None

"""Runs a store's coroutines on one loop, whoever calls: a coroutine of that loop, of another loop, or a thread without one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from streamrl.errors import ProtocolError

T = TypeVar("T")

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
    """``loop`` None: the loop of the first async call, or the background loop when a plain call comes first."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._loop = loop

    async def here(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await ``coroutine`` on the store's loop."""
        running = asyncio.get_running_loop()
        if self._loop is None or self._loop.is_closed():
            self._loop = running
        if self._loop is running:
            return await coroutine
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Block this thread until ``coroutine`` has run on the store's loop."""
        if self._loop is None or self._loop.is_closed():
            self._loop = background_loop()
        if _running_loop() is self._loop:
            coroutine.close()
            raise ProtocolError("the plain verbs block, got a call on the store's own event loop which would wait for itself; await the async_ twin")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None

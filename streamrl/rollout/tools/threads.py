"""Threads for the sync functions of tools: each call has its own, and at most ``size`` run at once.

A thread can't be stopped. A call that runs past its limit is left behind and counted as stuck until it returns; when all places are taken by
stuck calls, further calls fail at once instead of waiting for a place that may never come. The threads are daemons, so none keeps a process from
ending. Does not protect from code that holds the interpreter for long: such a tool belongs into a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from streamrl.protocol.waits import begun, queued

T = TypeVar("T")

SIZE = 32  # threads that compute share one interpreter: with many more the event loop would hardly get its turn


class ThreadsStuck(RuntimeError):
    """No thread is left for a call, and none will come back soon."""


class _Job:
    """One call. ``ended`` and ``left`` change under the lock of the pool."""

    def __init__(self, call: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        self.call = call
        self.future = future
        self.ended = False
        self.left = False  # its caller has gone


class ToolThreads:
    """Calls may come from several event loops; what waits is woken in its own."""

    def __init__(self, size: int = SIZE) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._running = 0
        self._stuck = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._granted: set[asyncio.Future[None]] = set()  # places given to callers that have not woken up yet

    @property
    def num_stuck(self) -> int:
        """Threads whose caller has gone."""
        return self._stuck

    async def run(self, call: Callable[[], T]) -> T:
        """What ``call`` returns or raises, once a thread is free. ThreadsStuck when all of them are stuck. When cancelled, the thread is left behind."""
        with queued():
            await self._enter()
        job = _Job(call, asyncio.get_running_loop().create_future())
        try:
            threading.Thread(target=self._work, args=(job,), name="streamrl-tool", daemon=True).start()
        except RuntimeError:  # the machine has no thread left
            self._leave()
            raise
        try:
            with begun():
                value, error = await job.future
        except asyncio.CancelledError:
            self._abandon(job)
            raise
        if error is not None:
            raise error
        return value

    def _work(self, job: _Job) -> None:
        value, error = None, None
        try:
            value = job.call()
        except Exception as raised:
            error = raised
        except BaseException as raised:  # sys.exit in a tool ends the call, nothing else
            error = RuntimeError(f"user code raised {type(raised).__name__}")
        with self._lock:
            job.ended = True
            self._stuck -= job.left
        self._leave()
        _wake(job.future, (value, error))

    async def _enter(self) -> None:
        with self._lock:
            if self._stuck >= self._size:
                raise self._all_stuck()
            if self._running < self._size:
                self._running += 1
                return
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            with self._lock:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(place)
                was_granted = place in self._granted
            if was_granted:  # in the same moment
                self._leave()
            raise
        finally:
            with self._lock:
                self._granted.discard(place)

    def _leave(self) -> None:
        """Give the place to the first that waits, or back."""
        with self._lock:
            while self._waiting:
                place = self._waiting.popleft()
                self._granted.add(place)
                if _wake(place, None):
                    return
                self._granted.discard(place)
            self._running -= 1

    def _abandon(self, job: _Job) -> None:
        with self._lock:
            if job.ended:
                return
            job.left = True
            self._stuck += 1
            if self._stuck < self._size:
                return
            waiting, self._waiting = list(self._waiting), deque()
        for place in waiting:
            _wake(place, self._all_stuck())

    def _all_stuck(self) -> ThreadsStuck:
        return ThreadsStuck(f"all {self._size} threads for tools are held by calls that ran past their limit")


def _wake(future: asyncio.Future[Any], value: Any) -> bool:
    """Set the result, or the exception that ``value`` is, from any thread; False when the future's event loop is closed."""

    def deliver() -> None:
        if not future.done():
            (future.set_exception if isinstance(value, BaseException) else future.set_result)(value)

    with contextlib.suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(deliver)
        return True
    return False

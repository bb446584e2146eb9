"""A process that runs untrusted plain score functions, so that one that hangs, leaks or crashes can be killed without harm.

``WorkerPool.call`` runs a function in one of a few workers and answers within its limit: a worker that runs past it is killed and
replaced, and the next call is served as usual. Messages are length-prefixed msgpack over pipes: names and plain values, no pickle.
The child imports the function by module and name, or loads it from a file; it imports no torch unless that code does.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from streamrl.errors import RewardError
from streamrl.protocol.deadline import within
from streamrl.protocol.interfaces import Clock
from streamrl.protocol.waits import begun
from streamrl.rewards.slots import Slots

START_S = 60.0  # for the child to start and import the function's module; not part of the limit of a call
STOP_S = 5.0
HEADER_BYTES = 4


class Target(msgspec.Struct, frozen=True):
    """Where the child finds the function: a module name or the path of a Python file, and the function's name in it."""

    module: str
    name: str
    is_file: bool = False

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Target:
        """Where ``function`` was defined: by its file where no import finds the module, as a script that was started or a custom file."""
        if function.__module__ == "__main__" or function.__module__ not in sys.modules:
            return cls(str(inspect.getsourcefile(function)), function.__qualname__, is_file=True)
        return cls(function.__module__, function.__qualname__)


class Call(msgspec.Struct, frozen=True):
    """One call, by position. ``target`` alone (no args) asks the child to import it and report."""

    target: Target
    args: list[Any] | None = None


class Reply(msgspec.Struct, frozen=True):
    """``error`` is "Type: message" of the exception that the function raised, None when ``value`` holds its result."""

    value: Any = None
    error: str | None = None


class Worker:
    """One child process, one call at a time."""

    def __init__(self, target: Target, process: asyncio.subprocess.Process) -> None:
        self._target = target
        self._process = process

    @classmethod
    async def start(cls, target: Target, clock: Clock) -> Worker:
        """A child that has imported the function; RewardError when that fails."""
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "streamrl.rewards.child", stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        worker = cls(target, process)
        try:
            reply = await within(worker._exchange(Call(target)), START_S, "the start of a reward worker", clock)
        except BaseException:
            await worker.kill()
            raise
        if reply.error is not None:
            await worker.kill()
            raise RewardError(f"the reward worker must import {target.name} of {target.module}, got {reply.error}; correct that file")
        return worker

    async def call(self, args: list[Any]) -> Reply:
        return await self._exchange(Call(self._target, args))

    async def _exchange(self, call: Call) -> Reply:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        payload = msgspec.msgpack.encode(call)
        try:
            stdin.write(len(payload).to_bytes(HEADER_BYTES, "big") + payload)
            await stdin.drain()
            size = int.from_bytes(await stdout.readexactly(HEADER_BYTES), "big")
            return msgspec.msgpack.decode(await stdout.readexactly(size), type=Reply)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise RewardError("a reward function must return, got an end of its process; see its output in the log") from error

    async def kill(self) -> None:
        """End the child and collect it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await asyncio.wait_for(self._process.wait(), STOP_S)


class WorkerPool:
    """At most ``size`` workers, started when needed; calls beyond that wait for a free one (``slots.py``)."""

    def __init__(self, target: Target, size: int, clock: Clock) -> None:
        self._target = target
        self._clock = clock
        self._slots = Slots(size, target.name)
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()

    async def call(self, args: list[Any], timeout_s: float) -> Any:
        """The function's result. WaitTimeout past the limit, RewardError when it raised or died; the worker is killed for both of these
        and on cancellation, since its process may still be busy."""
        async with self._slots.one():
            worker = self._idle.pop() if self._idle else await self._start()
            try:
                with begun(timeout_s):
                    reply = await within(worker.call(args), timeout_s, f"a call of {self._target.name}", self._clock)
            except BaseException:
                self._all.discard(worker)
                await worker.kill()
                raise
            self._idle.append(worker)
        if reply.error is not None:
            raise RewardError(f"a reward function must not raise, got {reply.error}; correct the function or the row")
        return reply.value

    async def close(self) -> None:
        """Kill all workers, busy ones too."""
        workers, self._all, self._idle = self._all, set(), []
        await asyncio.gather(*(worker.kill() for worker in workers))

    async def _start(self) -> Worker:
        with begun(START_S, "the start of a worker"):
            worker = await Worker.start(self._target, self._clock)
        self._all.add(worker)
        return worker

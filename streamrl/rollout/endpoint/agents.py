"""Running somebody's agent: a function, async or plain, or a command. It gets an OpenAI-compatible address, a key and the row; it may return a reward.

A function is called as ``agent(base_url, api_key, row)``. A command gets OPENAI_BASE_URL and OPENAI_API_KEY and the row as JSON on its standard
input; the last line it prints, when that is a JSON number or object, is its result. A cancelled function in a thread runs on without a key;
a cancelled command is ended with all processes it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import IO, Any

import msgspec

from streamrl.rollout.threads import call

KILL_AFTER_S = 2.0  # from the request to end
MAX_READ_BYTES = 1 << 20  # of what a command printed, from the end

RESULT_KEYS = frozenset({"reward", "turn_scores", "tool_rewards"})

_ending: set[asyncio.Future[None]] = set()  # asyncio keeps no reference to a task by itself


class AgentResult(msgspec.Struct, frozen=True):
    """What an agent returned. ``reward`` None: the run's scorer decides."""

    reward: float | None = None
    turn_scores: list[float] = []
    tool_rewards: list[float] = []


def read_result(value: Any) -> AgentResult:
    """
    >>> read_result({"reward": 1, "turn_scores": [0, 0.5]})
    AgentResult(reward=1.0, turn_scores=[0.0, 0.5], tool_rewards=[])
    """
    if isinstance(value, Real):
        return AgentResult(float(value))
    if value is not None and not (isinstance(value, dict) and value.keys() <= RESULT_KEYS):
        raise TypeError(f"an agent returns a number, None or a dict with {', '.join(sorted(RESULT_KEYS))}, got {value!r:.80}; correct it")
    return msgspec.convert(value or {}, AgentResult)


async def run_function(function: Callable[..., Any], base_url: str, api_key: str, row: dict[str, Any]) -> AgentResult:
    return read_result(await call(function, base_url, api_key, row))


async def run_command(command: Sequence[str], base_url: str, api_key: str, row: dict[str, Any]) -> AgentResult:
    """RuntimeError with the end of its error output when the command does not end with 0."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:  # a pipe may stay open in a grandchild
        given.write(msgspec.json.encode(row, enc_hook=repr) + b"\n")
        given.seek(0)
        process = await _started(command, _environment(os.environ, base_url, api_key), given, out, err)
        try:
            status = await process.wait()
        finally:
            await asyncio.shield(asyncio.ensure_future(_end(process)))
        if status != 0:
            raise RuntimeError(f"an agent's command ends with 0, got {status} of {command[0]}: {_tail(err).strip()[-400:]}")
        return read_result(_last_line(_tail(out)))


async def _started(command: Sequence[str], env: dict[str, str], given: IO[bytes], out: IO[bytes], err: IO[bytes]) -> asyncio.subprocess.Process:
    """Not cancelled half way, which would end the process alone: one that starts while the session is cancelled is ended with its children."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(*command, stdin=given, stdout=out, stderr=err, env=env, start_new_session=True)  # a group of its own
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        ending = asyncio.ensure_future(_end_started(starting))
        _ending.add(ending)
        ending.add_done_callback(_ending.discard)
        raise


async def _end_started(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    with contextlib.suppress(OSError):  # it could not be started
        await _end(await starting)


def _environment(inherited: Mapping[str, str], base_url: str, api_key: str) -> dict[str, str]:
    """A proxy of the machine must not stand between the agent and loopback."""
    direct = ",".join(filter(None, [inherited.get("NO_PROXY") or inherited.get("no_proxy"), "127.0.0.1"]))
    return {**inherited, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "NO_PROXY": direct, "no_proxy": direct}


async def _end(process: asyncio.subprocess.Process) -> None:
    """The whole group: asked first, for as long as the command itself still runs."""
    with contextlib.suppress(ProcessLookupError):  # nothing of the group is left
        for number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(process.pid, number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), KILL_AFTER_S)


def _tail(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_READ_BYTES))
    return file.read().decode(errors="replace")


def _last_line(text: str) -> Any:
    """The value of the last line when it is a JSON number or object; other output means nothing."""
    lines = text.strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return value if isinstance(value, int | float | dict) else None

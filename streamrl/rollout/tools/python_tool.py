"""A tool that runs the model's Python code: each call in a process of its own that starts empty and ends with the call.

    tools:
      - class_name: streamrl.rollout.tools.python_tool.PythonTool
        config: {type: native, wall_s: 10}

Best effort, not a sandbox. Limited: wall and CPU time, address space, size of every file and of the output; the process starts in an empty folder
without input, environment, site packages and core dumps, and is killed with its process group. **Not** stopped: network, reading whatever the
user may read, writing outside the folder, the sum of many files, starting processes (one that leaves its group outlives the call). Code of a model
that is rewarded for more than harmless answers belongs into a container or a virtual machine. No state is kept from one call to the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

import msgspec

from streamrl.config.base import Positive, Seconds, Section
from streamrl.errors import ConfigError
from streamrl.protocol.waits import begun, queued
from streamrl.rollout.tools.base import AgentData, BaseTool, ResponseOutcome, ToolResponse
from streamrl.rollout.tools.python_child import SAID

CHILD = Path(__file__).with_name("python_child.py")
FILE_BYTES = 16 << 20  # of every file that the code writes, the output among them
REAP_S = 60.0


class PythonLimits(Section, frozen=True):
    """``config`` of the tool."""

    type: str = "native"
    name: str = "python"
    wall_s: Seconds = 10.0  # from the start of the process; waiting for a place counts towards rollout.timeouts.tool_s alone
    cpu_s: Positive = 10
    memory_mib: Positive = 512  # address space; the interpreter itself takes about 30
    output_kib: Positive = 32  # the rest of a longer output is cut off
    max_processes: Positive = 8  # at the same time in one rollout process
    site_packages: bool = False  # whether installed packages can be imported


class PythonTool(BaseTool):
    """``execute({"code": ...})`` gives what the code printed, errors included, and why it was ended if it was."""

    def __init__(self, config: dict[str, Any], tool_schema: dict[str, Any] | None = None) -> None:
        try:
            self.limits = msgspec.convert(config, PythonLimits)
        except msgspec.ValidationError as error:
            raise ConfigError(f"the config of PythonTool takes {', '.join(PythonLimits.__struct_fields__)}, got one where {error}; correct it") from None
        super().__init__(config, tool_schema)
        if "code" not in self.tool_schema["function"].get("parameters", {}).get("properties", {}):
            raise ConfigError("the tool_schema of PythonTool has a parameter 'code', got none; add it, or leave tool_schema out")
        self._places = asyncio.Semaphore(self.limits.max_processes)

    def schema(self) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {"code": {"type": "string", "description": "A whole program."}}, "required": ["code"]}
        description = "Runs a Python program and returns what it prints. Nothing is kept from one call to the next."
        return {"type": "function", "function": {"name": self.limits.name, "description": description, "parameters": parameters}}

    async def execute(self, instance_id: str, parameters: dict[str, Any], *, agent_data: AgentData) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        with queued():
            await self._places.acquire()
        try:
            with begun(self.limits.wall_s):
                response = await self._run(str(parameters["code"]))
        finally:
            self._places.release()
        return response, None, {}

    async def _run(self, code: str) -> ToolResponse:
        folder = Path(tempfile.mkdtemp(prefix="streamrl-python-"))
        process = None
        try:
            (folder / "code.py").write_text(code, encoding="utf-8", errors="replace")
            with tempfile.TemporaryFile() as output:
                process = self._start(folder, output)
                in_time = await _ended(process.pid, self.limits.wall_s)
                _kill(process)
                await _ended(process.pid, 1.0)
                said = os.pread(output.fileno(), (self.limits.output_kib << 10) + 1, 0)
            return self._response(said, process.poll(), in_time)
        finally:  # also when the session is cancelled in the middle
            if process is not None:
                _kill(process)
            threading.Thread(target=_clean, args=(process, folder), name="streamrl-python-clean", daemon=True).start()

    def _start(self, folder: Path, output: IO[bytes]) -> subprocess.Popen[bytes]:
        flags = ["-I", "-u", "-X", "utf8", *([] if self.limits.site_packages else ["-S"])]
        limits = [str(self.limits.cpu_s), str(self.limits.memory_mib << 20), str(FILE_BYTES)]
        return subprocess.Popen(
            [sys.executable, *flags, str(CHILD), *limits],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={"HOME": str(folder), "TMPDIR": str(folder)},
            start_new_session=True,
        )

    def _response(self, said: bytes, status: int | None, in_time: bool) -> ToolResponse:
        limit = self.limits.output_kib << 10
        text = said[:limit].decode("utf-8", "replace") + ("\n[the rest of the output is cut off]" if len(said) > limit else "")
        outcome, ending = _ending(status, in_time, self.limits)
        return ToolResponse(text=f"{text.rstrip()}\n{ending}".strip() or "(no output)", outcome=outcome)


def _ending(status: int | None, in_time: bool, limits: PythonLimits) -> tuple[ResponseOutcome, str]:
    """(outcome, why the program ended where it did not just end and did not say it)."""
    if not in_time:
        return "timeout", f"[stopped after {limits.wall_s:g} s]"
    if status == -signal.SIGXCPU:
        return "timeout", f"[stopped after {limits.cpu_s} s of CPU time]"
    if status is not None and status < 0:
        return "error", f"[ended by signal {-status}]"
    if status:
        return "error", "" if status == SAID else f"[ended with exit status {status}]"
    return "ok", ""


async def _ended(pid: int, seconds: float) -> bool:
    """Whether the child ended in time. It is not reaped, so its process group keeps its number until it has been killed."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    handle = os.pidfd_open(pid)
    loop.add_reader(handle, _set, ended)
    try:
        done, _ = await asyncio.wait([ended], timeout=seconds)
        return bool(done)
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def _set(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The whole group, also what an ended child left behind; only while the child is not reaped and the number is surely its own."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _clean(process: subprocess.Popen[bytes] | None, folder: Path) -> None:
    """In a thread: a process that hangs in the kernel must not hold the event loop."""
    if process is not None:
        process.wait(REAP_S)
    shutil.rmtree(folder, ignore_errors=True)

"""Stack dumps of a run's processes, of hung ones too: a signal that the interpreter answers from C, whatever its threads do.

Each process registers a file of its own at its start (``register``); ``ask`` sends the signal, and only to a process that has: others would die of it. It
reaches processes of this machine. A process that is stopped or sits in the kernel writes when it goes on.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

from streamrl.diagnosis.view import Process, process_state, read_processes
from streamrl.telemetry.run_folder import RunFolder

SIGNAL = signal.SIGUSR1
WRITE_S = 2.0  # for a dump to arrive
POLL_S = 0.05


class Dump(NamedTuple):
    """What a process wrote, into ``file`` of the run folder; without one ``text`` says why there is nothing."""

    text: str
    file: str = ""


def stacks_file(folder: RunFolder, actor: str) -> Path:
    return folder.logs / f"{actor}.stacks"


def register(folder: RunFolder, actor: str) -> None:
    """From here on this process writes the stacks of all its threads into its file when it is asked. The file stays open until the process ends."""
    file = open(stacks_file(folder, actor), "ab", buffering=0)
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)


def ask(folder: RunFolder, actors: list[str]) -> dict[str, Dump]:
    """Stacks by actor, or why there are none."""
    processes = read_processes(folder)
    asked = {actor: _ask(folder, actor, processes.get(actor, [])) for actor in actors}
    return {actor: _read(folder, actor, begin) if isinstance(begin, int) else Dump(begin) for actor, begin in asked.items()}


def ask_driver(folder: RunFolder, pid: int) -> Dump:
    """The driver's own stacks."""
    begin = _signal(folder, "driver", pid)
    return _read(folder, "driver", begin) if isinstance(begin, int) else Dump(begin)


def _ask(folder: RunFolder, actor: str, processes: list[Process]) -> int | str:
    """Where in the actor's file its answer begins, or why there will be none."""
    if not processes:
        return "no process on record"
    mine = processes[0]
    if mine.state == "unknown":
        return f"pid {mine.pid} is on another machine: ask there"
    if process_state(mine.pid, mine.started) == "gone":
        return f"pid {mine.pid} is gone"
    return _signal(folder, actor, mine.pid)


def _signal(folder: RunFolder, actor: str, pid: int) -> int | str:
    if process_state(pid) == "stopped":
        return f"pid {pid} is stopped by a signal: it can write its stacks only once it goes on; kill -CONT {pid}, then ask again"
    if not _handles(pid):
        return f"pid {pid} has not registered for stack dumps (yet)"
    path = stacks_file(folder, actor)
    begin = path.stat().st_size if path.exists() else 0
    try:
        os.kill(pid, SIGNAL)
    except OSError as error:
        return f"pid {pid} cannot be asked: {error}"
    return begin


def _handles(pid: int) -> bool:
    """Whether the process catches the signal, as the kernel tells."""
    try:
        line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    except (OSError, StopIteration):
        return False
    return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)


def _read(folder: RunFolder, actor: str, begin: int) -> Dump:
    """What arrived since ``begin``, once it stays as it is."""
    path, deadline, size = stacks_file(folder, actor), time.monotonic() + WRITE_S, -1
    while time.monotonic() < deadline:
        now = path.stat().st_size if path.exists() else begin
        if now > begin and now == size:
            break
        size = now
        time.sleep(POLL_S)
    text = path.read_bytes()[begin:].decode(errors="replace").strip() if path.exists() else ""
    return Dump(text, str(path.relative_to(folder.root))) if text else Dump("nothing was written: it sits in the kernel, or has no file")

"""Processes that an actor started, written down with their start times so that a recycled pid is never ended by mistake.

The shared memory that an engine's processes made for each other is written down too: it has no owner once they are killed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec
import psutil

log = logging.getLogger(__name__)

SHM = Path("/dev/shm")
MACHINE = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # a run folder may be seen by several machines; a pid means something on one
_OURS = re.compile(r"(psm_|sem\.mp-)\w+$")  # the names that multiprocessing gives


class Child(msgspec.Struct, frozen=True):
    """A process and when it started (seconds since the epoch, as the kernel tells)."""

    pid: int
    started: float


class Record(msgspec.Struct, frozen=True):
    """What an actor leaves to end: processes, then files in shared memory."""

    processes: list[Child]
    shared_files: list[str]
    machine: str = ""  # on which these are


def record(path: Path, extra_pids: list[int]) -> None:
    """Write the process itself, its descendants and ``extra_pids`` (an engine's own) to ``path``, aside and renamed."""
    me = psutil.Process()
    found = {process.pid: process for process in [me, *me.children(recursive=True)]}
    for pid in extra_pids:
        if pid not in found and psutil.pid_exists(pid):
            found[pid] = psutil.Process(pid)
    processes = [Child(pid, process.create_time()) for pid, process in found.items()]
    files = sorted(set().union(*(_shared_files(pid) for pid in found)))
    aside = path.with_suffix(".tmp")
    aside.write_bytes(msgspec.json.encode(Record(processes, files, MACHINE)))
    aside.rename(path)


def recorded(paths: Iterable[Path]) -> list[psutil.Process]:
    """Processes in these records that are alive on this machine."""
    found: list[psutil.Process] = []
    for path in paths:
        try:
            left = msgspec.json.decode(path.read_bytes(), type=Record)
        except (OSError, msgspec.MsgspecError):
            continue  # none, or ``end_leftovers`` says so
        if left.machine in ("", MACHINE):
            found += [process for child in left.processes if (process := _same_process(child)) is not None]
    return found


def end_leftovers(path: Path, wait_s: float = 3.0, grace_s: float = 0.0) -> int:
    """End what is left of the processes in ``path`` (terminate, then kill) and remove the file. Number of processes ended. What is on another machine
    is left to an actor there. ``grace_s``: for those that are ending by themselves; Ray calls it an error when a signal is sooner than its own."""
    if not path.exists():
        return 0
    try:
        left = msgspec.json.decode(path.read_bytes(), type=Record)
    except msgspec.MsgspecError:
        log.warning("%s is not readable; its processes cannot be ended", path)
        return 0
    if left.machine not in ("", MACHINE):
        return 0
    known = [process for child in left.processes if (process := _same_process(child)) is not None]
    _, alive = psutil.wait_procs(known, timeout=grace_s)
    trackers = [process for process in alive if _is_tracker(process)]
    workers = [process for process in alive if process not in trackers]
    for process in workers:
        _quietly(process.terminate)
    _, stubborn = psutil.wait_procs(workers, timeout=wait_s)
    _kill(stubborn, wait_s)
    _, stuck = psutil.wait_procs(trackers, timeout=wait_s)  # a tracker removes its parent's shared memory, then ends by itself
    _kill(stuck, wait_s)
    for file in left.shared_files:
        (SHM / file).unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    return len(alive)


def _kill(processes: list[psutil.Process], wait_s: float) -> None:
    for process in processes:
        _quietly(process.kill)
    psutil.wait_procs(processes, timeout=wait_s)


def _shared_files(pid: int) -> set[str]:
    """Shared memory and semaphores of Python's multiprocessing that a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {name for line in lines if (name := line.partition("/dev/shm/")[2]) and _OURS.match(name) and not name.endswith("(deleted)")}


def _same_process(child: Child) -> psutil.Process | None:
    try:
        process = psutil.Process(child.pid)
        return process if abs(process.create_time() - child.started) < 0.1 else None
    except psutil.NoSuchProcess:
        return None


def _is_tracker(process: psutil.Process) -> bool:
    """Python's own process that cleans up after its parent's end."""
    try:
        return any("resource_tracker" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _quietly(action) -> None:
    try:
        action()
    except psutil.NoSuchProcess:
        pass

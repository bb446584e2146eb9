"""Processes that an actor started, written down with their start times so that a recycled pid is never ended by mistake."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import psutil

log = logging.getLogger(__name__)


class Child(msgspec.Struct, frozen=True):
    """A process and when it started (seconds since the epoch, as the kernel tells)."""

    pid: int
    started: float


def record(path: Path, extra_pids: list[int]) -> None:
    """Write the process itself, its descendants and ``extra_pids`` (an engine's own) to ``path``, aside and renamed."""
    me = psutil.Process()
    found = {process.pid: process for process in [me, *me.children(recursive=True)]}
    for pid in extra_pids:
        if pid not in found and psutil.pid_exists(pid):
            found[pid] = psutil.Process(pid)
    children = [Child(pid, process.create_time()) for pid, process in found.items()]
    aside = path.with_suffix(".tmp")
    aside.write_bytes(msgspec.json.encode(children))
    aside.rename(path)


def end_leftovers(path: Path, wait_s: float = 3.0) -> int:
    """End what is left of the processes in ``path`` (terminate, then kill) and remove the file. Number of processes ended."""
    if not path.exists():
        return 0
    try:
        children = msgspec.json.decode(path.read_bytes(), type=list[Child])
    except msgspec.MsgspecError:
        log.warning("%s is not readable; its processes cannot be ended", path)
        return 0
    alive = [process for child in children if (process := _same_process(child)) is not None]
    trackers = [process for process in alive if _is_tracker(process)]
    workers = [process for process in alive if process not in trackers]
    for process in workers:
        _quietly(process.terminate)
    _, stubborn = psutil.wait_procs(workers, timeout=wait_s)
    _kill(stubborn, wait_s)
    _, stuck = psutil.wait_procs(trackers, timeout=wait_s)  # a tracker removes its parent's shared memory, then ends by itself
    _kill(stuck, wait_s)
    path.unlink(missing_ok=True)
    return len(alive)


def _kill(processes: list[psutil.Process], wait_s: float) -> None:
    for process in processes:
        _quietly(process.kill)
    psutil.wait_procs(processes, timeout=wait_s)


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

"""The processes a vLLM engine started: their ids, and an end by force for those that an orderly shutdown leaves."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_TRACKER_S = 3.0  # a tracker ends by itself, a moment after the last process that it tracks for
_KILL_S = 5.0  # from SIGKILL to gone, on a machine that swaps


def pids_of(llm: AsyncLLM) -> list[int]:
    """Engine core and, below it, tensor-parallel workers; those that still run."""
    manager = llm.engine_core.resources.engine_manager
    found: set[int] = set()
    for process in getattr(manager, "processes", []):
        if process.pid is None:
            continue
        try:
            own = psutil.Process(process.pid)
            found |= {own.pid, *(child.pid for child in own.children(recursive=True))}
        except psutil.NoSuchProcess:
            continue
    return sorted(found)


def end_processes(pids: list[int]) -> None:
    """Kill those of ``pids`` that still run and wait until they are gone. Python's resource trackers come last and get time of their own:
    they remove the shared memory that the killed ones could not."""
    workers, trackers = [], []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            (trackers if "resource_tracker" in " ".join(process.cmdline()) else workers).append(process)
        except psutil.NoSuchProcess:
            continue
    _kill(workers)
    _, stuck = psutil.wait_procs(trackers, timeout=_TRACKER_S)
    _kill(stuck)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_KILL_S)

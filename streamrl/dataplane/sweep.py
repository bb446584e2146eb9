"""Removes what dead runs left in shared memory. A folder belongs to the process named in its owner file, known by pid *and* start time,
so a recycled pid protects nothing. Folders of other users and foreign names are never touched."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)

PREFIX = "streamrl-"
OWNER_FILE = "owner.json"
NEWBORN_S = 60.0  # a folder without an owner file may be one that is just being made


class Owner(msgspec.Struct, frozen=True):
    """The process a folder lives for. ``started``: clock ticks since boot, from the process table. ``life``: of a run whose driver is on another node;
    the process is then the actor that keeps the folder, and its successor of the same life takes over."""

    pid: int
    started: int
    life: str = ""


def process_start(pid: int) -> int | None:
    """Start time of a process, None when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])  # the name before it may hold spaces and parentheses


def write_owner(folder: Path, pid: int, life: str = "") -> None:
    """Tie ``folder`` to a running process."""
    started = process_start(pid)
    if started is None:
        raise ProcessLookupError(f"the owner of a store folder is a running process, got pid {pid}; pass the pid of the run's driver")
    (folder / OWNER_FILE).write_bytes(msgspec.json.encode(Owner(pid, started, life)))


def is_owner(folder: Path, pid: int, life: str = "") -> bool:
    """Whether ``folder`` is tied to the process that has this pid now, or to this life."""
    try:
        owner = msgspec.json.decode((folder / OWNER_FILE).read_bytes(), type=Owner)
    except (FileNotFoundError, msgspec.DecodeError):
        return False
    return owner.life == life if life else owner == Owner(pid, process_start(pid) or 0)


def open_folder(folder: Path, pid: int, life: str = "") -> Path:
    """``folder``, made anew, empty and tied to a running process."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    write_owner(folder, pid, life)
    return folder


def sweep(shm_dir: Path, keep: Iterable[Path] = ()) -> list[Path]:
    """Remove the folders of runs whose owner is dead, but none of ``keep``: what a journal names is adopted. Returns what was removed."""
    removed, kept = [], {Path(folder).absolute() for folder in keep}
    for folder in sorted(Path(shm_dir).glob(f"{PREFIX}*")):
        if _is_ours(folder) and not _is_owned(folder) and folder.absolute() not in kept:
            shutil.rmtree(folder, ignore_errors=True)
            log.info("removed the segments of a dead run: %s", folder.name)
            removed.append(folder)
    return removed


def _is_ours(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid()


def _is_owned(folder: Path) -> bool:
    try:
        owner = msgspec.json.decode((folder / OWNER_FILE).read_bytes(), type=Owner)
    except FileNotFoundError:
        return folder.exists() and time.time() - folder.stat().st_mtime < NEWBORN_S
    except msgspec.DecodeError:
        return False
    return process_start(owner.pid) == owner.started

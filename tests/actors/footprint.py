"""What a run takes from the machine at one moment: memory, threads and open files of each of its processes, and its files.

Mapped segments count in every process that maps them, so memory is split: ``own_bytes`` is anonymous memory, ``shared_bytes`` shared memory and
mapped files. Linux only: it reads /proc.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
import psutil

from streamrl.dataplane.journal import Lent, State, read_journal
from streamrl.telemetry.run_folder import RunFolder
from tests.actors.jobs import Job, shared_memory_of

SHM = Path("/dev/shm")
RAY = "ray "  # how the names of Ray's own processes begin


class Process(msgspec.Struct, frozen=True):
    """One process."""

    own_bytes: int
    shared_bytes: int
    threads: int
    files: int


class Footprint(msgspec.Struct, frozen=True):
    """All of it, ``at_s`` seconds after the launch. Folder sizes count allocated bytes."""

    at_s: float
    step: int
    processes: dict[str, Process]
    shm_bytes: int
    shm_files: int
    run_bytes: int
    run_files: int  # but for the ledger's
    ledger_files: int


def footprint(job: Job, at_s: float) -> Footprint:
    """Of a running launch."""
    shm = list(_sizes(SHM / name for name in shared_memory_of(job.folder)))
    run = list(_sizes([job.folder]))
    processes = {name: found for name, pid in _family(job).items() if (found := _process(pid)) is not None}
    ledger = len(list(RunFolder(job.folder).ledger.iterdir()))
    return Footprint(at_s, last_step(job.folder), processes, sum(shm), len(shm), sum(run), len(run) - ledger, ledger)


def last_step(folder: Path) -> int:
    """The newest trained step, read from the end of a file that may be long."""
    try:
        with RunFolder(folder).steps.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            lines = file.read().splitlines()[1:]  # the first one may be cut
    except FileNotFoundError:
        return 0
    return max((msgspec.json.decode(line)["step"] for line in lines[-2:]), default=0)


def lent_bytes(folder: Path) -> int:
    """Segments that writers got over the whole run, by the journal of a store that is open. More than its capacity: it was freed and used again."""
    total, size = 0, 0
    for record in read_journal(RunFolder(folder).ledger):
        if isinstance(record, State):
            total, size = (record.next_id - 1), max((segment.ref.size_bytes for segment in record.segments), default=0)
        elif isinstance(record, Lent):
            total, size = max(total, record.ref.segment_id), record.ref.size_bytes
    return total * size


def _family(job: Job) -> dict[str, int]:
    """Name to pid: the driver, the actors, what actors started, and Ray's own processes."""
    names = {job.process.pid: "driver"}
    try:
        table = msgspec.json.decode(RunFolder(job.folder).waits.read_bytes())["actors"]
        names |= {health["pid"]: name for name, health in table.items() if health}
    except FileNotFoundError:
        pass
    found: dict[str, int] = {}
    for process in [psutil.Process(job.process.pid), *psutil.Process(job.process.pid).children(recursive=True)]:
        try:
            name = names.get(process.pid) or _name(process, names)
        except psutil.Error:
            continue
        while name in found:
            name += "'"
        found[name] = process.pid
    return found


def _name(process: psutil.Process, actors: dict[int, str]) -> str:
    parent = actors.get(process.ppid())
    words = process.cmdline() or [process.name()]
    if parent and parent != "driver":
        return f"{parent} / {Path(words[0]).name}"
    scripts = [Path(word).stem for word in words[:4] if word.endswith(".py")]
    return RAY + (scripts[0] if scripts else Path(words[0]).name)[:24]


def _process(pid: int) -> Process | None:
    """None when it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    values = {key: value.split()[0] for key, _, value in (line.partition(":") for line in lines) if value.strip()}
    if "RssAnon" not in values:
        return None  # a zombie
    kib = {key: int(values[key]) * 1024 for key in ("RssAnon", "RssFile", "RssShmem")}
    return Process(kib["RssAnon"], kib["RssFile"] + kib["RssShmem"], int(values["Threads"]), files)


def _sizes(roots: Iterable[Path]) -> Iterable[int]:
    """Allocated bytes of every file below."""
    for root in roots:
        for folder, _, names in os.walk(root):
            for name in names:
                try:
                    yield os.lstat(Path(folder) / name).st_blocks * 512
                except OSError:
                    continue

"""The newest warnings and errors of a run, from the ends of its log files, as ``logs.py`` writes them. Reads some kB of each file, however long it is."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

TAIL_BYTES = 32_768
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (WARNING|ERROR|CRITICAL) +(\S+) v\S+ \S+ [\w.]+: (.*)")


@dataclass(frozen=True, order=True)
class Complaint:
    """A line of a log; of a traceback the line that it is of. ``time`` is local, as logged: it sorts."""

    time: str
    actor: str
    level: str
    message: str


def newest_complaints(logs: Path, count: int) -> list[Complaint]:
    """Of all actors, oldest first."""
    found: list[Complaint] = []
    for path in logs.glob("*.log") if logs.is_dir() else ():
        found += [Complaint(match[1], match[3], match[2], match[4]) for match in map(_LINE.match, _tail(path)) if match]
    return sorted(found)[-count:]


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read().decode(errors="replace").split("\n")
    except OSError:
        return []  # gone, or not ours to read

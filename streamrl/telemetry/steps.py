"""The step log: one JSON line a step. A process that dies in the middle of a line costs that line and nothing else."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger(__name__)

TAIL_BYTES = 256 * 1024  # many steps


class StepLog:
    """Appends records. Opening an existing log cuts off an unfinished last line, so that what follows stays readable."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b", buffering=0)
        _cut_unfinished_line(self._file.fileno())

    def append(self, record: Any) -> None:
        """One record (dict or Struct) as one line in one write; NaN becomes null."""
        self._file.write(msgspec.json.encode(record) + b"\n")

    def close(self) -> None:
        self._file.close()


def read_steps(path: Path) -> list[dict[str, Any]]:
    """All complete records in file order; empty when there is no log yet. Lines that are no record are skipped with a warning."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is unfinished
    except FileNotFoundError:
        return []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.MsgspecError:
            log.warning("line %d of %s is no step record; it is skipped", number, path)
    return records


def read_last_step(path: Path) -> dict[str, Any] | None:
    """The newest record of a training step (others are of validations and warnings), from the end of the log; None when there is none there."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        try:
            record = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.MsgspecError:
            continue
        if {"step_s", "reward"} & record.keys():
            return record
    return None


def _cut_unfinished_line(handle: int) -> None:
    size = os.fstat(handle).st_size
    end = size
    while end and os.pread(handle, 1, end - 1) != b"\n":
        end -= 1
    if end < size:
        os.ftruncate(handle, end)

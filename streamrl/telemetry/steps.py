"""The step log: one JSON line a step. A process that dies in the middle of a line costs that line and nothing else.

A run that goes on from an older state does steps again; the log keeps both, and ``surviving`` says which count.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from streamrl.telemetry.appending import append_whole

log = logging.getLogger(__name__)

TAIL_BYTES = 256 * 1024  # many steps


class StepLog:
    """Appends records. The first one opens the log, and cuts off an unfinished last line, so that what follows stays readable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None

    def append(self, record: Any) -> None:
        """One record (dict or Struct) as one line in one write; NaN becomes null. OSError when the disk does not take it: the log is then as it was."""
        if self._handle is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o644)
            _cut_unfinished_line(self._handle)
        append_whole(self._handle, msgspec.json.encode(record) + b"\n", self._path)

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


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


def surviving(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the records that a later training step superseded: those of an equal or a higher step. Warnings stay: they tell what happened.

    A validation supersedes nothing: it goes on beside training, so its record may come after those of later steps.

    >>> [record["reward"] for record in surviving([{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.2}, {"step": 2, "reward": 0.3}])]
    [0.1, 0.3]
    """
    kept, lowest = [], math.inf
    for record in reversed(list(records)):
        step = record.get("step")
        if not isinstance(step, int) or step < lowest or record.get("warning") is not None:
            kept.append(record)
        if isinstance(step, int) and is_training_step(record):
            lowest = min(lowest, step)
    return kept[::-1]


def is_training_step(record: dict[str, Any]) -> bool:
    """Others are of validations and warnings."""
    return bool({"step_s", "reward"} & record.keys())


def read_last_step(path: Path) -> dict[str, Any] | None:
    """The newest record of a training step, which none supersedes, from the end of the log; None when there is none there."""
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
        if is_training_step(record):
            return record
    return None


def _cut_unfinished_line(handle: int) -> None:
    size = os.fstat(handle).st_size
    end = size
    while end and os.pread(handle, 1, end - 1) != b"\n":
        end -= 1
    if end < size:
        os.ftruncate(handle, end)

"""The files of a replay journal: ``replay-000001.journal``, ``replay-000002.journal``, ... in ``<run_dir>/ledger``.

A new file begins with the whole state, written aside and renamed, so the newest file always suffices for recovery; the older ones stay for the
audit. Written means handed to the operating system: it survives the death of every process. A new file's state is also fsynced.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from streamrl.errors import ProtocolError
from streamrl.protocol.framing import RecordWriter, read_records
from streamrl.replay.records import ENCODER, Call, Opening, read_record

log = logging.getLogger(__name__)

FOLDER = "ledger"  # below the run folder
ROTATE_BYTES = 64 << 20  # bounds what a recovery has to read
_NAME = re.compile(r"replay-(\d{6,})\.journal")


def journal_files(folder: Path) -> list[Path]:
    """Oldest first; empty when there is no journal."""
    found = [(int(match[1]), path) for path in folder.glob("replay-*.journal") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def read_file(path: Path) -> tuple[Opening, Iterator[Call]]:
    """The state a file begins with, and the calls after it in order."""
    records = (read_record(payload) for payload in read_records(path))
    opening = next(records, None)
    if not isinstance(opening, Opening):
        raise ProtocolError(f"a journal file begins with a state, got {type(opening).__name__} in {path}; restore the file from a copy")
    return opening, (_as_call(record, path) for record in records)


class Journal:
    """The one writer of a folder's journal."""

    def __init__(self, folder: Path, rotate_bytes: int = ROTATE_BYTES) -> None:
        self.folder = folder
        self._rotate_bytes = rotate_bytes
        self._begun_bytes = 0  # size of the file when it began: its state
        self._writer: RecordWriter | None = None

    def go_on(self) -> None:
        """Append to the newest file; a torn end is cut off."""
        self._writer, self._begun_bytes = RecordWriter(journal_files(self.folder)[-1]), 0

    def begin(self, opening: Opening) -> None:
        """Start the next file; the one before is complete."""
        self.folder.mkdir(parents=True, exist_ok=True)
        files = journal_files(self.folder)
        number = int(files[-1].stem.removeprefix("replay-")) + 1 if files else 1
        path = self.folder / f"replay-{number:06d}.journal"
        aside = path.with_suffix(".begun")
        aside.unlink(missing_ok=True)  # of a writer that was killed here
        writer = RecordWriter(aside)
        try:
            writer.append(ENCODER.encode(opening))
            writer.sync()
        finally:
            writer.close()
        self.close()
        os.replace(aside, path)
        _sync_folder(self.folder)
        self._writer = RecordWriter(path)
        self._begun_bytes = self._writer.size_bytes

    def append(self, call: Call) -> None:
        """OSError when it can't be written; the file then ends with the record before."""
        assert self._writer is not None, "begin or go_on comes first"
        self._writer.append(ENCODER.encode(call))

    def is_full(self) -> bool:
        """Calls for ``rotate_bytes``, and for as much as the state took: large states are not written again and again."""
        return self._writer is not None and self._writer.size_bytes - self._begun_bytes >= max(self._rotate_bytes, self._begun_bytes)

    def close(self) -> None:
        """Idempotent."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _as_call(record: Call | Opening, path: Path) -> Call:
    if isinstance(record, Call):
        return record
    raise ProtocolError(f"a journal file holds one state, at its beginning, got another one in {path}; restore the file from a copy")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""What a store's index must not forget, in files of one folder: ``store-000001.journal``, then ``store-000002.journal`` and so on.

A file begins with a full :class:`State` and goes on with one record a change, written before the change is made and before its caller has its
answer: what was acknowledged survives the death of every process. It does not survive the machine, and neither does the shared memory that it
describes. A new file is written aside, renamed, and then its predecessor is deleted, so that the newest file is always enough; nothing else
reads them. Knows neither segments nor rows: ``index.py`` writes the records and repeats them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from streamrl.errors import ProtocolError, StoreFull
from streamrl.protocol.fields import ColumnSpec
from streamrl.protocol.framing import RecordWriter, read_records
from streamrl.protocol.segments import PutRequest, SegmentRef

log = logging.getLogger(__name__)

ROTATE_BYTES = 64 << 20
Piece = tuple[int, int, int]  # segment, offset, length (entries of the free axis, or bytes of an object; 0 for fixed shapes)


class _Record(msgspec.Struct, array_like=True, tag=True):
    """Base of everything a journal holds."""


class Lent(_Record):
    """A segment went to a writer."""

    writer: str
    request_id: int
    ref: SegmentRef


class Sealed(_Record):
    """A writer is done with segments."""

    writer: str
    segment_ids: list[int]


class Put(_Record):
    """Columns and tags of a put that was found to be in order."""

    request: PutRequest


class Cleared(_Record):
    """Rows and whole groups that were freed."""

    partition_id: str
    keys: list[str]
    groups: list[str]


class Spilled(_Record):
    """Pieces that lie in a segment on disk from now on: (key, field, offset)."""

    partition_id: str
    ref: SegmentRef
    moves: list[tuple[str, str, int]]


class WriterGone(_Record):
    """A writer died."""

    writer: str


class SegmentState(msgspec.Struct, array_like=True):
    """A segment that is lent (``writer``) or holds rows. Its live bytes follow from the rows."""

    ref: SegmentRef
    writer: str | None
    request_id: int
    orphan: bool


class RowState(msgspec.Struct, array_like=True):
    """A row and where its columns lie."""

    key: str
    attempt: int | None
    tag: dict[str, Any]
    pieces: dict[str, Piece]


class PartitionState(msgspec.Struct, array_like=True):
    """A partition with its schema, and what it refuses to bring back."""

    name: str
    columns: dict[str, ColumnSpec]
    rows: list[RowState]
    tombstones: dict[str, int]
    ended: dict[str, int]


class State(_Record):
    """The whole index. ``folder``: where the segments lie; ``done``: requests that were carried out, by writer."""

    folder: str
    next_id: int = 1
    segments: list[SegmentState] = []
    partitions: list[PartitionState] = []
    done: dict[str, list[int]] = {}


Record = State | Lent | Sealed | Put | Cleared | Spilled | WriterGone
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


class Journal:
    """The one writer of a journal folder. ``state`` gives the index as it is before the next record."""

    def __init__(self, folder: Path, state: Callable[[], State], rotate_bytes: int = ROTATE_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._state = state
        self._rotate_bytes = rotate_bytes
        self._file = self._begin()

    def append(self, record: Record) -> None:
        """The record outlives this process from here on. StoreFull when its device has no room; nothing is written then."""
        if self._file.size_bytes >= max(self._rotate_bytes, 2 * self._state_bytes):  # twice: a large state is not written for few changes
            self._rotate()
        _write(self._file, record)

    def _rotate(self) -> None:
        try:
            full, self._file = self._file, self._begin()
        except StoreFull as error:
            log.warning("the store's journal goes on in %s: %s", self._file.path.name, error)
        else:
            full.close()

    def close(self) -> None:
        """Idempotent. The files stay."""
        self._file.close()

    def remove(self) -> None:
        """The store is gone, and nothing is left to recover."""
        self.close()
        for path in _files(self.folder):
            path.unlink()

    def _begin(self) -> RecordWriter:
        """The next file, in place of the ones before it."""
        older = _files(self.folder)
        path = self.folder / f"store-{_number(older[-1]) + 1 if older else 1:06d}.journal"
        aside = path.with_suffix(".new")
        aside.unlink(missing_ok=True)
        file = RecordWriter(aside)
        try:
            _write(file, self._state())
        except StoreFull:
            file.close()
            aside.unlink()
            raise
        self._state_bytes = file.size_bytes
        file.path = aside.rename(path)
        for old in older:
            old.unlink()
        return file


def read_journal(folder: Path) -> Iterator[Record]:
    """The records of the newest file; the first is a State. ProtocolError without a journal or for another kind of file."""
    files = _files(folder)
    if not files:
        raise ProtocolError(f"a store is recovered from its journal, got none in {folder}; start a new store")
    for payload in read_records(files[-1]):
        try:
            yield _DECODER.decode(payload)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a store's journal is read by the version that wrote it, got {error} in {files[-1]}; resume with that version") from error


def has_journal(folder: Path) -> bool:
    """Whether a store can be recovered from ``folder``."""
    return bool(_files(folder))


def journalled_folder(folder: Path) -> Path | None:
    """The folder of segments that the journal in ``folder`` names, to be kept by ``sweep``; None without a journal."""
    if not has_journal(folder):
        return None
    state = next(read_journal(folder), None)
    return Path(state.folder) if isinstance(state, State) else None


def _write(file: RecordWriter, record: Record) -> None:
    try:
        file.append(_ENCODER.encode(record))
    except OSError as error:
        raise StoreFull(f"the store's journal is on a device with room, got {error.strerror or error} for {file.path}; free space there") from error


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("store-*.journal"), key=_number)


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("store-"))

"""Segments on disk: rows that are kept but not needed soon make room in shared memory. Readers map them like any other segment.

A file holds the pieces of one request, column by column, behind the usual header. It survives what the store's journal survives: every process, not
the machine. It is never written again, and goes when its last row is cleared. Decides nothing: the index says which rows move and repoints them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from streamrl.dataplane.journal import Piece
from streamrl.dataplane.segments import HEADER_BYTES, Mappings, create_segment
from streamrl.errors import StoreFull
from streamrl.protocol.segments import SegmentRef


class Resident(NamedTuple):
    """A piece that lies in shared memory."""

    key: str
    field: str
    piece: Piece
    num_bytes: int


class SpillFolder:
    """Files of one store below ``spill_dir``; None: there is no such folder."""

    def __init__(self, spill_dir: str | None, store: Path) -> None:
        self._path = None if spill_dir is None else Path(spill_dir).absolute() / store.name
        self._store = store

    async def copy(self, pieces: list[Resident], segments: dict[int, SegmentRef], segment_id: int) -> SegmentRef:
        """A new file with the bytes of ``pieces`` back to back. StoreFull when the disk has no room; nothing is left then."""
        if self._path is None:
            raise StoreFull("rows are moved to a disk that the store was told of, got none; set dataplane.spill_dir")
        size = HEADER_BYTES + sum(resident.num_bytes for resident in pieces)
        ref = SegmentRef(segment_id, secrets.token_hex(16), 1, size, str(self._path))
        mapped = Mappings(self._store, writable=False)
        sources = {number: mapped.get(segments[number]) for number in {resident.piece[0] for resident in pieces}}  # now: rows may be cleared meanwhile
        try:
            await asyncio.to_thread(_write, ref, pieces, sources)
        except OSError as error:
            self.remove(ref)
            raise StoreFull(
                f"rows are moved to a disk with room for them, got {error.strerror or error} for {size} bytes in {self._path}; "
                "free space there or name another dataplane.spill_dir"
            ) from error
        return ref

    def remove(self, ref: SegmentRef) -> None:
        """A file that nobody was pointed to."""
        with contextlib.suppress(OSError):
            (Path(ref.folder) / ref.name).unlink()

    def keep_only(self, names: set[str]) -> None:
        """Remove what a killed process left half done; the folder itself when it is empty."""
        if self._path is None or not self._path.is_dir():
            return
        for path in self._path.iterdir():
            if path.name not in names:
                path.unlink()
        if not names:
            self._path.rmdir()


def _write(ref: SegmentRef, pieces: list[Resident], sources: dict[int, np.ndarray]) -> None:
    """A piece that is cleared meanwhile is copied from whatever lies there; nobody is pointed to it."""
    folder = Path(ref.folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    create_segment(folder / ref.name, ref.size_bytes, ref.generation)
    target = Mappings(folder, writable=True).get(ref)
    for resident, place in zip(pieces, places(pieces), strict=True):
        segment_id, offset, _ = resident.piece
        target[place : place + resident.num_bytes] = sources[segment_id][offset : offset + resident.num_bytes]


def places(pieces: list[Resident]) -> Iterator[int]:
    """Where each piece begins in its file."""
    place = HEADER_BYTES
    for resident in pieces:
        yield place
        place += resident.num_bytes


def parts(pieces: list[Resident], part_bytes: int) -> Iterator[list[Resident]]:
    """Portions of about ``part_bytes``, each of whole rows in their order, laid out column by column so that a read is one run."""
    part: list[Resident] = []
    size = 0
    for place, resident in enumerate(pieces):
        part.append(resident)
        size += resident.num_bytes
        row_ends = place + 1 == len(pieces) or pieces[place + 1].key != resident.key
        if row_ends and size >= part_bytes:
            yield sorted(part, key=_field)
            part, size = [], 0
    if part:
        yield sorted(part, key=_field)


def _field(resident: Resident) -> str:
    return resident.field

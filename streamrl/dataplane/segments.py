"""Shared-memory files: made with their space reserved, appended to by one writer, copied from by any reader.

Layout: 64 bytes of header (magic, generation), then pieces. The generation changes before a file is lent again, so a reader that compares it
before and after its copy knows whether the bytes were still its own. Doesn't know keys, columns or who may write.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import numpy as np

from streamrl.errors import MissingKey
from streamrl.protocol.segments import ABSENT, SegmentRef

HEADER_BYTES = 64
ALIGN_BYTES = 64  # start of a column: a cache line
_HEADER = struct.Struct("<8sQ")
_MAGIC = b"strlseg1"
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


def align(offset: int) -> int:
    """The next multiple of the alignment.

    >>> align(1), align(64)
    (64, 64)
    """
    return (offset + ALIGN_BYTES - 1) // ALIGN_BYTES * ALIGN_BYTES


def create_segment(path: Path, size_bytes: int, generation: int) -> None:
    """A new file, mode 0600, with all its pages reserved. OSError (ENOSPC) when they can't be had; nothing is left then."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        os.pwrite(fd, _HEADER.pack(_MAGIC, generation), 0)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)


def stamp_generation(path: Path, generation: int) -> None:
    """From now on readers of older generations find their rows gone."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, _HEADER.pack(_MAGIC, generation), 0)
    finally:
        os.close(fd)


def _map(path: Path, size_bytes: int, writable: bool) -> np.ndarray:
    fd = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        flags = mmap.MAP_SHARED | (_POPULATE if writable else 0)
        return np.frombuffer(mmap.mmap(fd, size_bytes, flags, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)), np.uint8)
    finally:
        os.close(fd)


class SegmentWriter:
    """Append end of a lent segment. ``open_puts`` counts ranges that are reserved but not yet registered: while there are some, it isn't sealed."""

    def __init__(self, folder: Path, ref: SegmentRef) -> None:
        self.ref = ref
        self.open_puts = 0
        self._bytes = _map(folder / ref.name, ref.size_bytes, writable=True)
        self._used = HEADER_BYTES

    def reserve(self, num_bytes: int) -> int | None:
        """Offset of a fresh range, or None when it doesn't fit."""
        start = align(self._used)
        if start + num_bytes > self.ref.size_bytes:
            return None
        self._used = start + num_bytes
        self.open_puts += 1
        return start

    def write(self, offset: int, chunks: list[np.ndarray]) -> None:
        """Copy byte arrays one behind the other."""
        for chunk in chunks:
            self._bytes[offset : offset + chunk.size] = chunk
            offset += chunk.size


class SegmentReader:
    """Maps segments of a folder and copies runs out of them; no view of a segment leaves it. Mappings of unlinked files are let go."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[str, np.ndarray] = {}

    def gather(self, runs: list[tuple[int, int, int]], segments: dict[int, SegmentRef], out: np.ndarray) -> None:
        """Fill the byte array ``out`` with the runs. Check the generations with :meth:`check` before and after."""
        place = 0
        for segment_id, offset, size in runs:
            if segment_id == ABSENT:
                out[place : place + size] = 0
            else:
                out[place : place + size] = self._maps[segments[segment_id].name][offset : offset + size]
            place += size

    def check(self, segments: list[SegmentRef]) -> None:
        """MissingKey when a segment is gone or has been lent again since the index answered."""
        for ref in segments:
            view = self._maps.get(ref.name)
            if view is None:
                view = self._open(ref)
            magic, generation = _HEADER.unpack_from(view)
            if magic != _MAGIC or generation != ref.generation:
                raise MissingKey(f"rows stay readable until they are cleared, got generation {generation} of segment {ref.name} instead of {ref.generation}; "
                                 "the rows were cleared during the read")

    def release_unlinked(self) -> None:
        """Drop mappings whose file is gone, so that their memory returns."""
        for name in [name for name in self._maps if not (self._folder / name).exists()]:
            del self._maps[name]

    def _open(self, ref: SegmentRef) -> np.ndarray:
        try:
            view = self._maps[ref.name] = _map(self._folder / ref.name, ref.size_bytes, writable=False)
        except FileNotFoundError:
            raise MissingKey(f"rows stay readable until they are cleared, got segment {ref.name} which is gone; the rows were cleared during the read") from None
        return view

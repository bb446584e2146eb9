"""Shared-memory files: made with their space reserved, appended to by one writer, copied from by any reader.

Layout: 64 bytes of header (magic, generation), then pieces. The generation changes before a file is lent again, so a reader that compares it
before and after its copy knows whether the bytes were still its own. Doesn't know keys, columns or who may write.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from streamrl.config.rollout import DataplaneConfig
from streamrl.dataplane.buffers import Buffers
from streamrl.errors import MissingKey
from streamrl.protocol.segments import ABSENT, SegmentRef

HEADER_BYTES = 64
ALIGN_BYTES = 64  # start of a column: a cache line
_HEADER = struct.Struct("<8sQ")
_MAGIC = b"strlseg1"
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
PAGE_BYTES = 4096
MIN_SEGMENTS = 16  # a segment is at most this share of the capacity, so that several writers can have one each

Run = tuple[int, int, int]  # segment, offset, bytes


def standard_bytes(config: DataplaneConfig) -> int:
    """Size of the segments that are recycled; larger puts get a file of their own."""
    return max(PAGE_BYTES, min(config.segment_bytes, config.capacity_bytes // MIN_SEGMENTS) // PAGE_BYTES * PAGE_BYTES)


def align(offset: int) -> int:
    """The next multiple of the alignment.

    >>> align(1), align(64)
    (64, 64)
    """
    return (offset + ALIGN_BYTES - 1) // ALIGN_BYTES * ALIGN_BYTES


def segment_path(folder: Path, ref: SegmentRef) -> Path:
    """The file of a segment: in the store's ``folder``, or in the one on disk that the reference names."""
    return (Path(ref.folder) if ref.folder else folder) / ref.name


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


def is_intact(path: Path, ref: SegmentRef) -> bool:
    """Whether the file is there, of its size and generation; a machine that was started anew has lost it."""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size == ref.size_bytes and file.read(_HEADER.size) == _HEADER.pack(_MAGIC, ref.generation)
    except OSError:
        return False


def _map(path: Path, size_bytes: int, writable: bool) -> np.ndarray:
    fd = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        flags = mmap.MAP_SHARED | (_POPULATE if writable else 0)
        return np.frombuffer(mmap.mmap(fd, size_bytes, flags, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)), np.uint8)
    finally:
        os.close(fd)


class Mappings:
    """Files of a folder that this process has mapped. They are kept, since a recycled file is lent again; those of unlinked files are let go."""

    def __init__(self, folder: Path, writable: bool) -> None:
        self._folder = folder
        self._writable = writable
        self._maps: dict[Path, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._maps)

    def known(self, ref: SegmentRef) -> np.ndarray | None:
        """The mapping of a file that was mapped before."""
        return self._maps.get(segment_path(self._folder, ref))

    def get(self, ref: SegmentRef) -> np.ndarray:
        """The whole file. FileNotFoundError when it was removed."""
        path = segment_path(self._folder, ref)
        found = self._maps.get(path)
        if found is None:
            found = self._maps[path] = _map(path, ref.size_bytes, self._writable)
        return found

    def release_unlinked(self) -> None:
        """Drop mappings whose file is gone, so that their memory returns."""
        for path in list(self._maps):
            if not path.exists():
                self._maps.pop(path, None)


class SegmentWriter:
    """Append end of a lent segment, for several threads. Between :meth:`reserve` and :meth:`release` a put is open; it isn't sealed meanwhile."""

    def __init__(self, mapped: np.ndarray, ref: SegmentRef) -> None:
        self.ref = ref
        self._guard = threading.Lock()
        self._open_puts = 0
        self._retired = False
        self._bytes = mapped
        self._used = HEADER_BYTES

    def reserve(self, num_bytes: int) -> int | None:
        """Offset of a fresh range, or None when it doesn't fit or the segment takes no more."""
        with self._guard:
            start = align(self._used)
            if self._retired or start + num_bytes > self.ref.size_bytes:
                return None
            self._used = start + num_bytes
            self._open_puts += 1
            return start

    def release(self) -> None:
        """The put is over, well or not."""
        with self._guard:
            self._open_puts -= 1

    def retire(self) -> None:
        """Take no more puts."""
        with self._guard:
            self._retired = True

    @property
    def is_done(self) -> bool:
        """Whether it may be sealed."""
        return self._retired and not self._open_puts

    def write(self, offset: int, chunks: list[np.ndarray]) -> None:
        """Copy 1-D arrays of one dtype one behind the other."""
        if len(chunks) == 1:
            self._bytes[offset : offset + chunks[0].nbytes].view(chunks[0].dtype)[:] = chunks[0]
            return
        size = sum(chunk.nbytes for chunk in chunks)
        if size:
            np.concatenate(chunks, out=self._bytes[offset : offset + size].view(chunks[0].dtype))


class SegmentReader:
    """Copies runs out of the segments of a folder; no view of a segment leaves this package."""

    def __init__(self, folder: Path) -> None:
        self.mappings = Mappings(folder, writable=False)
        self._buffers = Buffers()

    def copy(self, columns: Sequence[Sequence[Run]], segments: Sequence[SegmentRef]) -> list[np.ndarray]:
        """One byte array per column: its runs back to back. MissingKey when a segment was cleared or lent again before the copy was done."""
        views = {ref.segment_id: self._view(ref) for ref in segments}
        _verify(views, segments)
        buffers = [self._gather(runs, views) for runs in columns]
        _verify(views, segments)
        return buffers

    def _view(self, ref: SegmentRef) -> np.ndarray:
        try:
            return self.mappings.get(ref)
        except FileNotFoundError:
            raise _gone(f"segment {ref.name} which is removed") from None

    def _gather(self, runs: Sequence[Run], views: dict[int, np.ndarray]) -> np.ndarray:
        out, place = self._buffers.take(sum(run[2] for run in runs)), 0
        for segment_id, offset, size in runs:
            out[place : place + size] = 0 if segment_id == ABSENT else views[segment_id][offset : offset + size]
            place += size
        return out


def _verify(views: dict[int, np.ndarray], segments: Sequence[SegmentRef]) -> None:
    for ref in segments:
        magic, generation = _HEADER.unpack(views[ref.segment_id][: _HEADER.size].tobytes())
        if magic != _MAGIC or generation != ref.generation:
            raise _gone(f"generation {generation} of segment {ref.name} instead of {ref.generation}")


def _gone(what: str) -> MissingKey:
    return MissingKey(f"rows stay readable until they are cleared, got {what}; they were cleared during the read")

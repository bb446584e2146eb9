"""The segments of one node: made, lent to writers, sealed, recycled, and counted against the byte budget.

One writer appends to a segment at a time; when it is sealed and its last live byte is cleared, the file becomes a spare for the next writer (fresh
pages are the main cost of a large put). A dead writer's files are unlinked instead: if it was only silent, its late bytes reach nobody.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from streamrl.dataplane.segments import HEADER_BYTES, PAGE_BYTES, create_segment, stamp_generation
from streamrl.errors import ProtocolError, StoreFull
from streamrl.protocol.segments import SegmentRef
from streamrl.protocol.topic import Topic

log = logging.getLogger(__name__)

MAX_SPARES = 4  # recycled files kept for the next writers: a quarter of the capacity


@dataclass(slots=True)
class Segment:
    """One use of a file."""

    ref: SegmentRef
    writer: str | None  # None: sealed
    live_bytes: int = 0
    orphan: bool = False  # its writer died


class SegmentPool:
    """Owns the files in ``folder``."""

    def __init__(self, folder: Path, capacity_bytes: int, segment_bytes: int) -> None:
        self.folder = folder
        self.capacity_bytes = capacity_bytes
        self.segment_bytes = segment_bytes
        self.segments: dict[int, Segment] = {}
        self._spares: list[SegmentRef] = []
        self._next_id = 1
        self._making_bytes = 0  # files that are being created
        self._freed = Topic()

    @property
    def allocated_bytes(self) -> int:
        return sum(segment.ref.size_bytes for segment in self.segments.values()) + self._making_bytes

    @property
    def spare_bytes(self) -> int:
        return sum(ref.size_bytes for ref in self._spares)

    async def lend(self, writer: str, num_bytes: int, timeout_s: float) -> SegmentRef:
        """A segment with room for ``num_bytes``; waits for freed space, then StoreFull with the numbers."""
        size = self.segment_bytes
        if num_bytes + HEADER_BYTES > size:
            size = -(-(num_bytes + HEADER_BYTES) // PAGE_BYTES) * PAGE_BYTES
        if size > self.capacity_bytes:
            raise self._full(size, 0.0, "the put alone is larger than the capacity")
        loop = asyncio.get_running_loop()
        deadline, cause = loop.time() + timeout_s, "the capacity is used up"
        while True:
            try:
                ref = await self._find(size)
            except OSError as error:
                ref, cause = None, f"the device has no room ({error.strerror})"
            if ref is not None:
                self.segments[ref.segment_id] = Segment(ref, writer)
                return ref
            if not await self._freed.wait_until(deadline):
                raise self._full(size, timeout_s, cause)

    def check_put(self, writer: str, segment_id: int | None, begin: int, end: int) -> None:
        """ProtocolError unless ``writer`` may register the bytes [begin, end) of the segment."""
        if begin == end:
            return
        segment = None if segment_id is None else self.segments.get(segment_id)
        if segment is None or segment.writer != writer:
            holder = "gone" if segment is None else f"held by {segment.writer or 'nobody (sealed)'}"
            raise ProtocolError(f"a put registers bytes of a segment lent to it, got segment {segment_id} of {writer} which is {holder}; write the rows again")
        if begin < HEADER_BYTES or end > segment.ref.size_bytes:
            raise ProtocolError(f"a put lies inside its segment of {segment.ref.size_bytes} bytes, got [{begin}, {end}); both sides must run one version")

    def seal(self, writer: str, segment_ids: Iterable[int]) -> None:
        """The writer is done with these; empty ones are recycled at once."""
        for segment_id in segment_ids:
            segment = self.segments.get(segment_id)
            if segment is not None and segment.writer == writer:
                segment.writer = None
                self._reclaim(segment)

    def orphan(self, writer: str) -> int:
        """The writer died: its segments are sealed. Matches a full writer name or its part before '#'. Number of segments."""
        found = [s for s in self.segments.values() if s.writer is not None and writer in (s.writer, s.writer.split("#")[0])]
        for segment in found:
            segment.writer, segment.orphan = None, True
            self._reclaim(segment)
        return len(found)

    def add_live(self, segment_id: int, num_bytes: int) -> None:
        self.segments[segment_id].live_bytes += num_bytes

    def drop_live(self, segment_id: int, num_bytes: int) -> None:
        """Bytes nobody can reach any more."""
        segment = self.segments[segment_id]
        segment.live_bytes -= num_bytes
        self._reclaim(segment)

    def close(self) -> None:
        """Unlink every file; waiting puts end at their deadline."""
        for ref in [*self._spares, *(segment.ref for segment in self.segments.values())]:
            self._unlink(ref)
        self._spares, self.segments = [], {}

    async def _find(self, size: int) -> SegmentRef | None:
        """A spare or a new file; None when the budget has no room."""
        if size == self.segment_bytes and self._spares:
            return self._reuse(self._spares.pop())
        while self._spares and self.allocated_bytes + self.spare_bytes + size > self.capacity_bytes:
            self._unlink(self._spares.pop())
        if self.allocated_bytes + size > self.capacity_bytes:
            return None
        ref = SegmentRef(self._take_id(), secrets.token_hex(16), 1, size)
        self._making_bytes += size
        try:
            await asyncio.to_thread(create_segment, self.folder / ref.name, size, ref.generation)
        finally:
            self._making_bytes -= size
        return ref

    def _reuse(self, spare: SegmentRef) -> SegmentRef:
        """The generation changes before anyone can write."""
        stamp_generation(self.folder / spare.name, spare.generation + 1)
        return SegmentRef(self._take_id(), spare.name, spare.generation + 1, spare.size_bytes)

    def _reclaim(self, segment: Segment) -> None:
        if segment.writer is not None or segment.live_bytes:
            return
        del self.segments[segment.ref.segment_id]
        if segment.orphan or segment.ref.size_bytes != self.segment_bytes or len(self._spares) >= MAX_SPARES:
            self._unlink(segment.ref)
        else:
            self._spares.append(segment.ref)
        self._freed.wake()

    def _unlink(self, ref: SegmentRef) -> None:
        try:
            (self.folder / ref.name).unlink()
        except FileNotFoundError:
            log.warning("segment %s was removed by someone else", ref.name)

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _full(self, size: int, waited_s: float, cause: str) -> StoreFull:
        disk = os.statvfs(self.folder)
        live = sum(segment.live_bytes for segment in self.segments.values())
        return StoreFull(
            f"a put waits at most {waited_s:g} s for room, got none for a segment of {size} bytes: {cause}; capacity {self.capacity_bytes}, "
            f"allocated {self.allocated_bytes} in {len(self.segments)} segments, live {live}, free on the device {disk.f_bavail * disk.f_frsize}; "
            "raise dataplane.capacity_bytes, or lower replay.max_staleness or the batch size"
        )

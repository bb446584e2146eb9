"""The segments of one node: made, lent to writers, sealed, recycled, and counted against the byte budget.

One writer appends to a segment at a time; when it is sealed and its last live byte is cleared, the file becomes a spare for the next writer (fresh
pages are the main cost of a large put). A dead writer's files are unlinked instead: if it was only silent, its late bytes reach nobody.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from streamrl.dataplane.journal import SegmentState
from streamrl.dataplane.segments import HEADER_BYTES, PAGE_BYTES, create_segment, is_intact, segment_path, stamp_generation
from streamrl.dataplane.sweep import OWNER_FILE
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
    request_id: int = 0  # of the writer's lend
    live_bytes: int = 0
    orphan: bool = False  # its writer died


class SegmentPool:
    """Owns the files in ``folder``. While a journal is repeated no file is touched; :meth:`adopt` then compares with what is there."""

    def __init__(self, folder: Path, capacity_bytes: int, segment_bytes: int) -> None:
        self.folder = folder
        self.capacity_bytes = capacity_bytes
        self.segment_bytes = segment_bytes
        self.segments: dict[int, Segment] = {}
        self._spares: list[SegmentRef] = []
        self._stuck: list[SegmentRef] = []  # files that could not be removed
        self.next_id = 1
        self._repeating = False
        self._making_bytes = 0  # files that are being created
        self._freed = Topic()

    @property
    def allocated_bytes(self) -> int:
        used = sum(s.ref.size_bytes for s in self.segments.values() if not s.ref.folder)
        return used + sum(ref.size_bytes for ref in self._stuck if not ref.folder) + self._making_bytes

    @property
    def spilled_bytes(self) -> int:
        return sum(s.ref.size_bytes for s in self.segments.values() if s.ref.folder)

    @property
    def spare_bytes(self) -> int:
        return sum(ref.size_bytes for ref in self._spares)

    async def find(self, num_bytes: int, timeout_s: float, make_room: Callable[[int], Awaitable[bool]]) -> SegmentRef:
        """A segment with room for ``num_bytes`` that nobody has yet: assign it at once. Where there is none, ``make_room`` may move bytes away (False:
        it could not), else it waits for freed space, then StoreFull with the numbers."""
        size = self.segment_bytes
        if num_bytes + HEADER_BYTES > size:
            size = -(-(num_bytes + HEADER_BYTES) // PAGE_BYTES) * PAGE_BYTES
        if size > self.capacity_bytes:
            raise self._full(size, 0.0, "the put alone is larger than the capacity")
        loop = asyncio.get_running_loop()
        deadline, cause = loop.time() + timeout_s, "the capacity is used up"
        while True:
            try:
                ref = await self._take(size)
            except OSError as error:
                ref, cause = None, f"the device has no room ({error.strerror})"
            if ref is not None:
                return ref
            if await make_room(size):
                continue
            if not await self._freed.wait_until(deadline):
                raise self._full(size, timeout_s, cause)

    def assign(self, ref: SegmentRef, writer: str, request_id: int) -> None:
        """``writer`` may append to the segment from here on."""
        self._hold(Segment(ref, writer, request_id))

    def hold(self, ref: SegmentRef) -> None:
        """A segment that was written as a whole; rows follow at once."""
        self._hold(Segment(ref, None))

    def _hold(self, segment: Segment) -> None:
        self.segments[segment.ref.segment_id] = segment
        self.next_id = max(self.next_id, segment.ref.segment_id + 1)

    def is_sealed(self, segment_id: int) -> bool:
        """Whether the segment is in shared memory and no writer has it: moving its rows away frees it."""
        segment = self.segments.get(segment_id)
        return segment is not None and segment.writer is None and not segment.ref.folder

    def has_room(self, size: int) -> bool:
        """Whether a segment of this size could be had now."""
        return self.allocated_bytes + size <= self.capacity_bytes

    def give_back(self, ref: SegmentRef) -> None:
        """A found segment that nobody took."""
        self._keep(ref, False)

    def lent(self, writer: str, request_id: int) -> SegmentRef | None:
        """What this request of ``writer`` was given before."""
        found = (s.ref for s in self.segments.values() if s.writer == writer and s.request_id == request_id)
        return next(found, None) if request_id else None

    def check_put(self, writer: str, segment_id: int | None, begin: int, end: int) -> None:
        """ProtocolError unless ``writer`` may register the bytes [begin, end) of the segment."""
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
        return self._orphan([s for s in self.segments.values() if s.writer is not None and writer in (s.writer, s.writer.split("#")[0])])

    def orphan_all(self) -> int:
        """No writer is left."""
        return self._orphan([s for s in self.segments.values() if s.writer is not None])

    def _orphan(self, segments: list[Segment]) -> int:
        for segment in segments:
            segment.writer, segment.orphan = None, True
            self._reclaim(segment)
        return len(segments)

    def add_live(self, segment_id: int, num_bytes: int) -> None:
        self.segments[segment_id].live_bytes += num_bytes

    def drop_live(self, segment_id: int, num_bytes: int) -> None:
        """Bytes nobody can reach any more."""
        segment = self.segments[segment_id]
        segment.live_bytes -= num_bytes
        self._reclaim(segment)

    # ---- recovery

    def state(self) -> list[SegmentState]:
        """What a journal needs to know."""
        return [SegmentState(s.ref, s.writer, s.request_id, s.orphan) for s in self.segments.values()]

    def restore(self, states: list[SegmentState], next_id: int) -> None:
        """Begin to repeat a journal. The rows' live bytes are added by those who hold them."""
        self._repeating, self.next_id = True, next_id
        self.segments = {s.ref.segment_id: Segment(s.ref, s.writer, s.request_id, 0, s.orphan) for s in states}

    def adopt(self) -> set[int]:
        """End of the repetition: files that hold nothing are removed. Numbers of the segments whose bytes are gone; they are lent to nobody."""
        self._repeating = False
        held = {segment.ref.name for segment in self.segments.values()} | {OWNER_FILE}
        for path in self.folder.iterdir():
            if path.name not in held:
                path.unlink()
        lost = {number for number, segment in self.segments.items() if not is_intact(segment_path(self.folder, segment.ref), segment.ref)}
        self._orphan([self.segments[number] for number in lost])
        return lost

    def close(self) -> None:
        """Unlink every file; waiting puts end at their deadline."""
        for ref in [*self._spares, *self._stuck, *(segment.ref for segment in self.segments.values())]:
            self._unlink(ref)
        self._spares, self._stuck, self.segments = [], [], {}

    async def _take(self, size: int) -> SegmentRef | None:
        """A spare or a new file; None when the budget has no room."""
        self._retry_stuck()
        while size == self.segment_bytes and self._spares:
            spare = self._spares.pop()
            try:
                return self._reuse(spare)
            except OSError as error:
                log.warning("a spare segment can't be used again: %s", error)
                self._unlink(spare)
        while self._spares and self.allocated_bytes + self.spare_bytes + size > self.capacity_bytes:
            self._unlink(self._spares.pop())
        if not self.has_room(size):
            return None
        ref = SegmentRef(self.take_id(), secrets.token_hex(16), 1, size)
        self._making_bytes += size
        try:
            await asyncio.to_thread(create_segment, self.folder / ref.name, size, ref.generation)
        finally:
            self._making_bytes -= size
        return ref

    def _reuse(self, spare: SegmentRef) -> SegmentRef:
        """The generation changes before anyone can write."""
        stamp_generation(self.folder / spare.name, spare.generation + 1)
        return SegmentRef(self.take_id(), spare.name, spare.generation + 1, spare.size_bytes)

    def _reclaim(self, segment: Segment) -> None:
        """Once nobody writes to it and nothing in it can be reached."""
        if segment.writer is None and not segment.live_bytes and self.segments.pop(segment.ref.segment_id, None) is not None:
            self._keep(segment.ref, segment.orphan)

    def _keep(self, ref: SegmentRef, orphan: bool) -> None:
        """As a spare if it may serve again."""
        if self._repeating:
            return
        if orphan or ref.folder or ref.size_bytes != self.segment_bytes or len(self._spares) >= MAX_SPARES:
            self._unlink(ref)
        else:
            self._spares.append(ref)
        self._freed.wake()

    def _unlink(self, ref: SegmentRef) -> None:
        try:
            segment_path(self.folder, ref).unlink()
        except FileNotFoundError:
            log.warning("segment %s was removed by someone else", ref.name)
        except OSError as error:  # its rows are gone all the same; the file still takes room and is tried again
            log.warning("segment %s could not be removed: %s", ref.name, error)
            self._stuck.append(ref)

    def _retry_stuck(self) -> None:
        stuck, self._stuck = self._stuck, []
        for ref in stuck:
            self._unlink(ref)

    def take_id(self) -> int:
        """The number of the next segment; none is used twice."""
        self.next_id += 1
        return self.next_id - 1

    def _full(self, size: int, waited_s: float, cause: str) -> StoreFull:
        disk = os.statvfs(self.folder)
        live = sum(segment.live_bytes for segment in self.segments.values())
        return StoreFull(
            f"a put waits at most {waited_s:g} s for room, got none for a segment of {size} bytes: {cause}; capacity {self.capacity_bytes}, "
            f"allocated {self.allocated_bytes} in {len(self.segments)} segments, live {live}, free on the device {disk.f_bavail * disk.f_frsize}; "
            "raise dataplane.capacity_bytes, or lower replay.max_staleness or the batch size"
        )

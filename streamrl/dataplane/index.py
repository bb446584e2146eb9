"""The one owner of a node's index: which piece of which segment holds (partition, key, field), tags, tombstones, byte counts.

Clients write bytes into lent segments themselves and register them here; a put is checked as a whole before anything changes. Calls run on one
event loop and never await between reading and changing, so each is atomic; only ``lend`` waits, for room. Knows nothing of values.

With a journal every change is on record before it is made, so that :meth:`StoreIndex.recover` gives the same index after any process was killed.

Rows whose tag carries ``attempt`` belong to a group: a higher attempt replaces the row with all its columns, a lower one is a StaleWrite, and a
cleared row leaves a tombstone so that a late write can't bring a ghost back.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections import Counter
from pathlib import Path
from typing import Any

from streamrl.config.base import refuse
from streamrl.config.rollout import DataplaneConfig
from streamrl.dataplane.journal import Cleared, Journal, Lent, Put, Record, Sealed, Spilled, State, WriterGone, read_journal
from streamrl.dataplane.partition import Partition, Plan
from streamrl.dataplane.pool import SegmentPool
from streamrl.dataplane.segments import standard_bytes
from streamrl.dataplane.spill import Resident, SpillFolder, parts, places
from streamrl.dataplane.sweep import PREFIX, is_owner, write_owner
from streamrl.errors import DtypeClash, MissingKey, ProtocolError, StaleWrite, StoreFull, StreamrlError
from streamrl.protocol.rpc import at_once
from streamrl.protocol.segments import Located, PartitionUse, PutRequest, SegmentRef, StoreUse

log = logging.getLogger(__name__)

REMEMBERED_PUTS = 1024  # of each writer: more than it has on the way at a time


class StoreIndex:
    """Implements :class:`~streamrl.dataplane.calls.IndexCalls` over ``<folder_root>/streamrl-<run_id>-<random>/`` (mode 0700, removed by :meth:`close`).

    ``journal``: the folder of its journal, ``<run_dir>/ledger``; None: the rows don't outlive this process. ``life``: see ``sweep.Owner``.
    """

    _journal: Journal | None

    def __init__(self, folder_root: Path, run_id: str, config: DataplaneConfig, owner_pid: int, journal: Path | None = None, life: str = "") -> None:
        _check_room(folder_root, config.capacity_bytes)
        self._set_up(Path(folder_root) / f"{PREFIX}{run_id}-{secrets.token_hex(8)}", config)
        self.path.mkdir(mode=0o700)
        write_owner(self.path, owner_pid, life)
        self._journal = None if journal is None else Journal(journal, self._state)

    @classmethod
    def recover(cls, journal: Path, config: DataplaneConfig, owner_pid: int, life: str = "") -> StoreIndex:
        """The index as its journal has it, over the folder of its former life. If that folder lived for another process than ``owner_pid``, its
        writers are gone with that process. ``lost_keys`` names, by partition, the rows whose segments are no longer there."""
        records = read_journal(journal)
        state = next(records, None)
        if not isinstance(state, State):
            raise ProtocolError(f"a store's journal begins with a state, got {type(state).__name__} in {journal}; restore it from a copy or start a new run")
        index = cls.__new__(cls)
        index._set_up(Path(state.folder), config)
        index._restore(state)
        for record in records:
            index._repeat(record)
        index._adopt(owner_pid, life)
        index._journal = Journal(journal, index._state)
        return index

    def _set_up(self, path: Path, config: DataplaneConfig) -> None:
        self.path = path
        self.lost_keys: dict[str, list[str]] = {}
        self._put_timeout_s = config.put_timeout_s
        self._pool = SegmentPool(self.path, config.capacity_bytes, standard_bytes(config))
        self._spills, self._spilling = config.spill, asyncio.Lock()
        self._disk = SpillFolder(config.spill_dir, path)
        self._partitions: dict[str, Partition] = {}
        self._done: dict[str, dict[int, None]] = {}  # writer -> its latest puts that were carried out
        self._deaths: Counter[str] = Counter()  # by actor: how often it was declared dead
        self._rejected: Counter[str] = Counter()  # puts, by reason

    async def folder(self) -> str:
        return str(self.path)

    async def lend(self, writer: str, num_bytes: int, request_id: int) -> SegmentRef:
        deaths = self._deaths[_actor(writer)]
        ref = self._pool.lent(writer, request_id) or await self._pool.find(num_bytes, self._put_timeout_s, self._make_room)
        if self._deaths[_actor(writer)] != deaths:  # a call outlives its caller: what a dead writer waited for would never be sealed
            self._pool.give_back(ref)
            raise StaleWrite(f"a segment is lent to a writer that lives, got {writer!r}, which died while it waited; its successor asks for itself")
        earlier = self._pool.lent(writer, request_id)
        if earlier is not None:
            if earlier != ref:
                self._pool.give_back(ref)
            return earlier
        try:
            self._record(Lent(writer, request_id, ref))
        except StoreFull:
            self._pool.give_back(ref)
            raise
        self._pool.assign(ref, writer, request_id)
        return ref

    async def seal(self, writer: str, segment_ids: list[int]) -> None:
        self._record(Sealed(writer, segment_ids))
        self._pool.seal(writer, segment_ids)

    @at_once
    async def put(self, request: PutRequest) -> None:
        if request.request_id in self._done.get(request.writer, ()):
            return
        partition = self._partitions.get(request.partition_id) or Partition(request.partition_id, self._pool)
        try:
            plan = partition.check(request)
        except StreamrlError as error:
            self._rejected["stale_write" if isinstance(error, StaleWrite) else "dtype" if isinstance(error, DtypeClash) else "malformed"] += 1
            raise
        self._record(Put(request))
        self._apply_put(request, partition, plan)

    def _apply_put(self, request: PutRequest, partition: Partition, plan: Plan) -> None:
        self._partitions[request.partition_id] = partition
        partition.apply(request, plan)
        if request.request_id:
            done = self._done.setdefault(request.writer, {})
            done[request.request_id] = None
            if len(done) > REMEMBERED_PUTS:
                del done[next(iter(done))]

    async def locate(self, partition_id: str, keys: list[str], fields: list[str] | None, optional: bool) -> Located:
        partition = self._partitions.get(partition_id)
        if partition is None:
            raise MissingKey(f"rows are read from a partition that has some, got {partition_id!r}; known: {sorted(self._partitions)}")
        return partition.locate(keys, fields, optional)

    async def attempts(self, partition_id: str, keys: list[str]) -> list[int | None]:
        partition = self._partitions.get(partition_id)
        rows = [None if partition is None else partition.rows.get(key) for key in keys]
        return [None if row is None else -1 if row.attempt is None else row.attempt for row in rows]

    async def tags(self, partition_id: str | None) -> dict[str, dict[str, dict[str, Any]]]:
        names = list(self._partitions) if partition_id is None else [partition_id]
        return {name: self._partitions[name].tags() for name in names if name in self._partitions and self._partitions[name].rows}

    async def clear(self, partition_id: str, keys: list[str], groups: list[str]) -> int:
        partition = self._partitions.get(partition_id)
        if partition is None:
            return 0
        self._record(Cleared(partition_id, keys, groups))
        return partition.clear(keys, groups)

    async def spill(self, partition_id: str, keys: list[str], groups: list[str]) -> int:
        partition = self._partitions.get(partition_id)
        pieces = [] if partition is None else partition.residents(keys, groups)
        return sum([await self._move(partition, part) for part in parts(pieces, self._pool.segment_bytes) if partition is not None])

    async def _move(self, partition: Partition, pieces: list[Resident]) -> int:
        """Copy what is still there, then repoint what is still where it was copied from."""
        pieces = [resident for resident in pieces if partition.still_there(resident)]
        if not pieces:
            return 0
        segments = {number: segment.ref for number, segment in self._pool.segments.items()}
        ref = await self._disk.copy(pieces, segments, self._pool.take_id())
        copied = [(resident, place) for resident, place in zip(pieces, places(pieces), strict=True) if partition.still_there(resident)]
        moves = [(resident.key, resident.field, place) for resident, place in copied]
        try:
            if moves:
                self._record(Spilled(partition.name, ref, moves))
        except StoreFull:
            self._disk.remove(ref)
            raise
        if not moves:
            self._disk.remove(ref)
            return 0
        self._pool.hold(ref)
        partition.move(ref.segment_id, moves)
        return sum(resident.num_bytes for resident, _ in copied)

    async def _make_room(self, size: int) -> bool:
        """With ``dataplane.spill`` the oldest rows give way to a put. False when none is left, or the disk has no room."""
        if not self._spills:
            return False
        async with self._spilling:
            if self._pool.has_room(size):
                return True
            try:
                return sum([await self.spill(name, keys, []) for name, keys in self._oldest(size).items()]) > 0
            except StoreFull as error:
                log.warning("no room was made in shared memory: %s", error)
                return False

    def _oldest(self, num_bytes: int) -> dict[str, list[str]]:
        """Rows of the lowest sequence numbers, about ``num_bytes`` of them, by partition."""
        chosen: dict[str, list[str]] = {}
        for _, name, key, size in sorted((seq_no, name, key, size) for name, p in self._partitions.items() for seq_no, key, size in p.aged()):
            if num_bytes > 0:
                chosen.setdefault(name, []).append(key)
                num_bytes -= size
        return chosen

    async def writer_gone(self, writer: str) -> int:
        self._record(WriterGone(writer))
        self._deaths[_actor(writer)] += 1
        return self._forget(writer)

    def _forget(self, writer: str) -> int:
        for name in [name for name in self._done if writer in (name, _actor(name))]:
            del self._done[name]
        return self._pool.orphan(writer)

    async def use(self) -> StoreUse:
        return StoreUse(
            capacity_bytes=self._pool.capacity_bytes,
            bytes_allocated=self._pool.allocated_bytes,
            bytes_spare=self._pool.spare_bytes,
            bytes_spilled=self._pool.spilled_bytes,
            bytes_live=sum(partition.live_bytes for partition in self._partitions.values()),
            segments=len(self._pool.segments),
            rejected_writes=self._rejected["stale_write"],
            partitions={name: PartitionUse(len(p.rows), len(p.groups), p.live_bytes) for name, p in self._partitions.items() if p.rows},
            rejected=dict(self._rejected),
        )

    # ---- recovery

    def _record(self, record: Record) -> None:
        """On record before the change is made; StoreFull leaves everything as it was."""
        if self._journal is not None:
            self._journal.append(record)

    def _state(self) -> State:
        done = {writer: list(numbers) for writer, numbers in self._done.items()}
        return State(str(self.path), self._pool.next_id, self._pool.state(), [p.state() for p in self._partitions.values()], done)

    def _restore(self, state: State) -> None:
        self._pool.restore(state.segments, state.next_id)
        self._done = {writer: dict.fromkeys(numbers) for writer, numbers in state.done.items()}
        for saved in state.partitions:
            partition = self._partitions[saved.name] = Partition(saved.name, self._pool)
            partition.restore(saved)

    def _repeat(self, record: Record) -> None:
        """One recorded change, without touching a file."""
        match record:
            case Put(request):
                partition = self._partitions.get(request.partition_id) or Partition(request.partition_id, self._pool)
                self._apply_put(request, partition, partition.check(request))
            case Cleared(partition_id, keys, groups):
                self._partitions[partition_id].clear(keys, groups)
            case Spilled(partition_id, ref, moves):
                self._pool.hold(ref)
                self._partitions[partition_id].move(ref.segment_id, moves)
            case Lent(writer, request_id, ref):
                self._pool.assign(ref, writer, request_id)
            case Sealed(writer, segment_ids):
                self._pool.seal(writer, segment_ids)
            case WriterGone(writer):
                self._forget(writer)

    def _adopt(self, owner_pid: int, life: str) -> None:
        """Take over the folder: its files, and its writers if they live."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        if not is_owner(self.path, owner_pid, life):
            self._done.clear()
            self._pool.orphan_all()
        write_owner(self.path, owner_pid, life)
        gone = self._pool.adopt()
        self._disk.keep_only({s.ref.name for s in self._pool.segments.values() if s.ref.folder})
        for name, partition in self._partitions.items():
            lost = partition.lose(gone)
            if lost:
                self.lost_keys[name] = lost

    def detach(self) -> None:
        """Stop without removing anything: the segments and the journal wait for :meth:`recover`."""
        if self._journal is not None:
            self._journal.close()

    def close(self) -> None:
        """Remove all segments, the folder and the journal. Clients must have stopped."""
        if self._journal is not None:
            self._journal.remove()
        self._pool.close()
        self._disk.keep_only(set())
        self._partitions.clear()
        for path in self.path.iterdir() if self.path.exists() else ():
            path.unlink()
        if self.path.exists():
            self.path.rmdir()


def _check_room(folder_root: Path, capacity_bytes: int) -> None:
    """Refuse at the start what would be a full device in the middle of a run."""
    if not Path(folder_root).is_dir():
        raise refuse("dataplane.shm_dir", "the folder of the segments exists", str(folder_root), "name a folder in memory, such as /dev/shm")
    disk = os.statvfs(folder_root)
    free = disk.f_bavail * disk.f_frsize
    if free < capacity_bytes:
        todo = f"lower it, free space in {folder_root} ({free} bytes free), name another dataplane.shm_dir, or give the container more (--shm-size)"
        raise refuse("dataplane.capacity_bytes", "the store fits into the shared memory that is free", capacity_bytes, todo)


def _actor(writer: str) -> str:
    """The actor behind a writer's name ``<actor>#<random>``."""
    return writer.split("#")[0]

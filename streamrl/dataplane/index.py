"""The one owner of a node's index: which piece of which segment holds (partition, key, field), tags, tombstones, byte counts.

Clients write bytes into lent segments themselves and register them here; a put is checked as a whole before anything changes. Calls run on one
event loop and never await between reading and changing, so each is atomic; only ``lend`` waits, for room. Knows nothing of values.

Rows whose tag carries ``attempt`` belong to a group: a higher attempt replaces the row with all its columns, a lower one is a StaleWrite, and a
cleared row leaves a tombstone so that a late write can't bring a ghost back.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any, Protocol

from streamrl.config.base import refuse
from streamrl.config.rollout import DataplaneConfig
from streamrl.dataplane.partition import Partition
from streamrl.dataplane.pool import SegmentPool
from streamrl.dataplane.segments import standard_bytes
from streamrl.dataplane.sweep import PREFIX, write_owner
from streamrl.errors import MissingKey, StaleWrite
from streamrl.protocol.segments import Located, PartitionUse, PutRequest, SegmentRef, StoreUse


class IndexCalls(Protocol):
    """The index as a client sees it, in its process or over a channel. ``lend`` answers within the put timeout of the index."""

    async def folder(self) -> str:
        """Where the segments lie."""
        ...

    async def lend(self, writer: str, num_bytes: int) -> SegmentRef:
        """An empty segment with room for ``num_bytes``; StoreFull with the numbers when none came free in time."""
        ...

    async def seal(self, writer: str, segment_ids: list[int]) -> None: ...
    async def put(self, request: PutRequest) -> None:
        """Register columns and tags: all of them, or an error and nothing."""
        ...

    async def locate(self, partition_id: str, keys: list[str], fields: list[str] | None, optional: bool) -> Located:
        """Pieces of the asked rows, in the asked order."""
        ...

    async def tags(self, partition_id: str | None) -> dict[str, dict[str, dict[str, Any]]]: ...
    async def clear(self, partition_id: str, keys: list[str], groups: list[str]) -> int:
        """Free rows; ``groups`` are uids that have ended: all their rows go and later writes are refused. Number of rows freed."""
        ...

    async def writer_gone(self, writer: str) -> int:
        """The process died: its segments are sealed; registered rows stay readable. Number of segments."""
        ...

    async def use(self) -> StoreUse: ...


class StoreIndex:
    """Implements :class:`IndexCalls` over ``<folder_root>/streamrl-<run_id>-<random>/`` (mode 0700, removed by :meth:`close`)."""

    def __init__(self, folder_root: Path, run_id: str, config: DataplaneConfig, owner_pid: int) -> None:
        _check_room(folder_root, config.capacity_bytes)
        self.path = Path(folder_root) / f"{PREFIX}{run_id}-{secrets.token_hex(8)}"
        self.path.mkdir(mode=0o700)
        write_owner(self.path, owner_pid)
        self._put_timeout_s = config.put_timeout_s
        self._pool = SegmentPool(self.path, config.capacity_bytes, standard_bytes(config))
        self._partitions: dict[str, Partition] = {}
        self._rejected = 0

    async def folder(self) -> str:
        return str(self.path)

    async def lend(self, writer: str, num_bytes: int) -> SegmentRef:
        return await self._pool.lend(writer, num_bytes, self._put_timeout_s)

    async def seal(self, writer: str, segment_ids: list[int]) -> None:
        self._pool.seal(writer, segment_ids)

    async def put(self, request: PutRequest) -> None:
        partition = self._partitions.get(request.partition_id) or Partition(request.partition_id, self._pool)
        try:
            plan = partition.check(request)
        except StaleWrite:
            self._rejected += 1
            raise
        self._partitions[request.partition_id] = partition
        partition.apply(request, plan)

    async def locate(self, partition_id: str, keys: list[str], fields: list[str] | None, optional: bool) -> Located:
        partition = self._partitions.get(partition_id)
        if partition is None:
            raise MissingKey(f"rows are read from a partition that has some, got {partition_id!r}; known: {sorted(self._partitions)}")
        return partition.locate(keys, fields, optional)

    async def tags(self, partition_id: str | None) -> dict[str, dict[str, dict[str, Any]]]:
        names = list(self._partitions) if partition_id is None else [partition_id]
        return {name: self._partitions[name].tags() for name in names if name in self._partitions and self._partitions[name].rows}

    async def clear(self, partition_id: str, keys: list[str], groups: list[str]) -> int:
        partition = self._partitions.get(partition_id)
        return 0 if partition is None else partition.clear(keys, groups)

    async def writer_gone(self, writer: str) -> int:
        return self._pool.orphan(writer)

    async def use(self) -> StoreUse:
        return StoreUse(
            capacity_bytes=self._pool.capacity_bytes,
            bytes_allocated=self._pool.allocated_bytes,
            bytes_spare=self._pool.spare_bytes,
            bytes_live=sum(partition.live_bytes for partition in self._partitions.values()),
            segments=len(self._pool.segments),
            rejected_writes=self._rejected,
            partitions={name: PartitionUse(len(p.rows), len(p.groups), p.live_bytes) for name, p in self._partitions.items() if p.rows},
        )

    def close(self) -> None:
        """Remove all segments and the folder. Clients must have stopped."""
        self._pool.close()
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

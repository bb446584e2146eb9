"""Messages between a store client and the index that owns a node's segments. Bytes never travel in them, only where bytes lie.

Worked example: rows A and B put one ragged int64 column of 3 and 2 entries into segment 7. The client wrote 40 bytes at offset 64 and
registers ``ColumnPut("x", spec, base=64, lengths=[3, 2])``; a later get of [B, A] answers ``runs=[(7, 88, 16), (7, 64, 24)]``, ``lengths=[2, 3]``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from streamrl.protocol.fields import ColumnSpec

ABSENT = -1  # segment number of a run without bytes: rows that lack the column, filled with zeros


class SegmentRef(msgspec.Struct, frozen=True, array_like=True):
    """One use of a shared-memory file. A recycled file gets a new ``segment_id`` and the next ``generation``."""

    segment_id: int
    name: str
    generation: int
    size_bytes: int
    folder: str = ""  # of a segment on disk; empty: the store's folder in shared memory


class ColumnPut(msgspec.Struct, array_like=True):
    """One column of a put: rows lie back to back from ``base``. ``lengths``: ragged: entries of the free axis; object: bytes; otherwise empty."""

    name: str
    spec: ColumnSpec
    base: int
    lengths: list[int]


class PutRequest(msgspec.Struct, array_like=True):
    """Upsert of columns and tags for ``keys``; ``segment_id`` None: no column has a byte. A repeated ``request_id`` of a writer changes nothing."""

    writer: str
    partition_id: str
    keys: list[str]
    columns: list[ColumnPut]
    segment_id: int | None = None
    tags: list[dict[str, Any]] | None = None
    request_id: int = 0  # 0: of no writer's count


class LocatedColumn(msgspec.Struct, array_like=True):
    """Where the asked rows of a column lie, in the asked order: ``runs`` are (segment, offset, bytes), adjacent rows joined."""

    name: str
    spec: ColumnSpec
    runs: list[tuple[int, int, int]]
    lengths: list[int]
    present: list[bool] | None = None  # with optional=True: which rows have the column


class Located(msgspec.Struct, array_like=True):
    """Answer to a get."""

    columns: list[LocatedColumn]
    segments: list[SegmentRef]


class PartitionUse(msgspec.Struct):
    """What is reachable in one partition."""

    rows: int = 0
    groups: int = 0
    bytes_live: int = 0


class StoreUse(msgspec.Struct):
    """Memory of one node's store."""

    capacity_bytes: int = 0
    bytes_allocated: int = 0  # segments that are lent to a writer or hold live rows
    bytes_spare: int = 0  # recycled segments that the next writer gets; inside the capacity
    bytes_spilled: int = 0  # segments on disk; outside of the capacity
    bytes_live: int = 0
    segments: int = 0
    rejected_writes: int = 0
    partitions: dict[str, PartitionUse] = {}
    rejected: dict[str, int] = {}  # refused puts since this process began: stale_write, dtype, malformed

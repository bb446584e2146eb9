"""The index as a client sees it, in its process or over a channel. Every call may be repeated when its answer was lost, also after a restart of
the index: puts and lends carry a number of their writer's count by which a repeat is known, and the others come to the same."""

from __future__ import annotations

from typing import Any, Protocol

from streamrl.protocol.segments import Located, PutRequest, SegmentRef, StoreUse


class IndexCalls(Protocol):
    """``lend`` answers within the put timeout of the index."""

    async def folder(self) -> str:
        """Where the segments lie."""
        ...

    async def lend(self, writer: str, num_bytes: int, request_id: int) -> SegmentRef:
        """An empty segment with room for ``num_bytes``; StoreFull with the numbers when none came free in time. A repeated request gets the same."""
        ...

    async def seal(self, writer: str, segment_ids: list[int]) -> None: ...
    async def put(self, request: PutRequest) -> None:
        """Register columns and tags: all of them, or an error and nothing."""
        ...

    async def locate(self, partition_id: str, keys: list[str], fields: list[str] | None, optional: bool) -> Located:
        """Pieces of the asked rows, in the asked order."""
        ...

    async def attempts(self, partition_id: str, keys: list[str]) -> list[int | None]:
        """Of each row; -1 for a row of no group, None where there is no row."""
        ...

    async def tags(self, partition_id: str | None) -> dict[str, dict[str, dict[str, Any]]]: ...
    async def clear(self, partition_id: str, keys: list[str], groups: list[str]) -> int:
        """Free rows; ``groups`` are uids that have ended: all their rows go and later writes are refused. Number of rows freed."""
        ...

    async def spill(self, partition_id: str, keys: list[str], groups: list[str]) -> int:
        """Move rows, and all rows of ``groups`` (uids), from shared memory to disk; they read as before. StoreFull when the disk has no room. Bytes
        moved; unknown rows and what lies on disk already are left out."""
        ...

    async def writer_gone(self, writer: str) -> int:
        """The process died: its segments are sealed; registered rows stay readable. Number of segments."""
        ...

    async def use(self) -> StoreUse: ...

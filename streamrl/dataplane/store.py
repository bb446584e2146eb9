"""The store's client: the kv verbs, with ``async_`` twins of the same meaning, and the trajectory face that the loops use.

A put copies its rows into the segment lent to this client and registers them with the index in one call; a get asks the index where the pieces
lie and copies them once, straight into the batch. No pickle anywhere. The async verbs are the implementation; the plain ones run them on
the given loop from another thread, or on a background loop of their own when none was given.

Its index calls may be repeated by whoever carries them, also across a restart of the index. Not here: reading from another node.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.config.rollout import DataplaneConfig
from streamrl.dataplane.arguments import check_tags, key_list
from streamrl.dataplane.calls import IndexCalls
from streamrl.dataplane.columns import EncodedColumn, decode_rows, decode_tensor, encode_columns, one_row
from streamrl.dataplane.runner import LoopRunner
from streamrl.dataplane.segments import Mappings, SegmentReader, SegmentWriter, align, standard_bytes
from streamrl.errors import MissingKey, ProtocolError, StoreFull, StreamrlError
from streamrl.protocol.fields import trajectory_columns
from streamrl.protocol.meta import KVBatchMeta
from streamrl.protocol.segments import ColumnPut, Located, LocatedColumn, PutRequest
from streamrl.protocol.trajectory import Trajectory

log = logging.getLogger(__name__)

THREAD_BYTES = 32 << 20  # larger copies leave the event loop, which this much holds up for about 10 ms; a thread that is waited for costs as much
UNLINKED_CHECK_S = 1.0


class Store:
    """One client of one node's store. ``writer`` names the process; segments are lent to ``<writer>#<random>``, so a restart is another writer.

    >>> store.kv_put("A_0_0", "train", {"score": np.float32(1)}, {"seq_len": 7})          # doctest: +SKIP
    >>> store.kv_batch_get(["A_0_0"], "train")["score"]                                   # doctest: +SKIP
    tensor([1.])
    """

    def __init__(self, index: IndexCalls, *, writer: str, folder: Path | None, config: DataplaneConfig, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.writer = f"{writer}#{secrets.token_hex(4)}"
        self._index = index
        self._request_ids = itertools.count(1)
        self._config = config
        self._run = LoopRunner(loop)
        self._folder = folder
        self._reader: SegmentReader | None = None
        self._mapped: Mappings | None = None
        self._current: SegmentWriter | None = None
        self._retired: list[SegmentWriter] = []
        self._lending: tuple[asyncio.AbstractEventLoop | None, asyncio.Lock] = (None, asyncio.Lock())
        self._checked_unlinked = 0.0

    # ---- writing ------------------------------------------------------------------------------------------------------------------------

    def kv_put(self, key: str, partition_id: str, fields: Any = None, tag: dict[str, Any] | None = None) -> None:
        """Upsert one row: tensors and arrays of ``fields`` get a batch dimension, other values become objects."""
        self._run.wait(self._put_row(key, partition_id, fields, tag))

    async def async_kv_put(self, key: str, partition_id: str, fields: Any = None, tag: dict[str, Any] | None = None) -> None:
        await self._run.here(self._put_row(key, partition_id, fields, tag))

    def kv_batch_put(self, keys: Sequence[str], partition_id: str, fields: Any = None, tags: Sequence[dict[str, Any]] | None = None) -> None:
        """Upsert the given columns of the given rows; other columns stay as they are, tags merge per name. All or nothing."""
        self._run.wait(self._put(keys, partition_id, fields, tags))

    async def async_kv_batch_put(self, keys: Sequence[str], partition_id: str, fields: Any = None, tags: Sequence[dict[str, Any]] | None = None) -> None:
        await self._run.here(self._put(keys, partition_id, fields, tags))

    async def put_trajectories(self, rows: list[Trajectory], tags: list[dict[str, Any]]) -> None:
        """Write the rows of one session and their tags in one atomic put. StoreFull after the put deadline."""
        await self.async_kv_batch_put([str(row.key) for row in rows], "train", trajectory_columns(rows), tags)

    # ---- reading ------------------------------------------------------------------------------------------------------------------------

    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str] | None = None, optional: bool = False) -> Any:
        """A TensorDict of the rows in key order: all columns common to them, or exactly ``select_fields``.

        With ``optional`` rows may lack a selected column (zeros, length 0 or None there) and ``presence`` holds one bool column per field.
        """
        return self._run.wait(self._get(keys, partition_id, select_fields, optional))

    async def async_kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str] | None = None, optional: bool = False) -> Any:
        return await self._run.here(self._get(keys, partition_id, select_fields, optional))

    def kv_batch_get_by_meta(self, meta: KVBatchMeta) -> Any:
        """As ``kv_batch_get`` for the rows and fields of ``meta``."""
        return self._run.wait(self._get(meta.keys, meta.partition_id, meta.fields, False))

    async def async_kv_batch_get_by_meta(self, meta: KVBatchMeta) -> Any:
        return await self._run.here(self._get(meta.keys, meta.partition_id, meta.fields, False))

    def get_numpy(self, keys: Sequence[str], partition_id: str, fields: Sequence[str] | None = None) -> dict[str, list[Any]]:
        """Columns as lists with one array, number or object per row. Needs no torch."""
        return self._run.wait(self._get_numpy(keys, partition_id, fields))

    async def async_get_numpy(self, keys: Sequence[str], partition_id: str, fields: Sequence[str] | None = None) -> dict[str, list[Any]]:
        return await self._run.here(self._get_numpy(keys, partition_id, fields))

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        """{partition: {key: tag}}; an unknown partition gives {}."""
        return self._run.wait(self._index.tags(partition_id))

    async def async_kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        return await self._run.here(self._index.tags(partition_id))

    # ---- freeing ------------------------------------------------------------------------------------------------------------------------

    def kv_clear(self, keys: Sequence[str], partition_id: str) -> int:
        """Free rows and tags; unknown keys are ignored. The number freed."""
        return self._run.wait(self._index.clear(partition_id, key_list(keys), []))

    async def async_kv_clear(self, keys: Sequence[str], partition_id: str) -> int:
        return await self._run.here(self._index.clear(partition_id, key_list(keys), []))

    async def clear(self, keys: list[str]) -> int:
        """Free rows of the training partition. A uid among ``keys`` is a group that has ended: all its rows go, later writes are refused."""
        rows = [key for key in keys if "_" in key]
        groups = [key for key in keys if "_" not in key]
        return await self._run.here(self._index.clear("train", rows, groups))

    async def spill(self, groups: list[str]) -> int:
        """Move all rows of these groups (uids) of the training partition to disk, where they take no shared memory and read as before. Bytes moved;
        StoreFull when the disk has no room, and what was not moved stays in memory."""
        return await self._run.here(self._index.spill("train", [], groups))

    async def aclose(self) -> None:
        """Seal this client's segments. Rows stay readable for others."""
        await self._run.here(self._close())

    def close(self) -> None:
        """As :meth:`aclose`."""
        self._run.wait(self._close())

    # ---- put, step by step --------------------------------------------------------------------------------------------------------------

    async def _put_row(self, key: str, partition_id: str, fields: Any, tag: dict[str, Any] | None) -> None:
        if fields is None and tag is None:
            raise ProtocolError(f"a put has fields or a tag, got neither for {key!r}; pass one of them")
        await self._put([key], partition_id, None if fields is None else one_row(fields), None if tag is None else [tag])

    async def _put(self, keys: Sequence[str], partition_id: str, fields: Any, tags: Sequence[dict[str, Any]] | None) -> None:
        names = key_list(keys)
        if fields is None and tags is None:
            raise ProtocolError(f"a put has fields or tags, got neither for {len(names)} keys; pass one of them")
        if len(set(names)) != len(names):
            raise ProtocolError(f"keys of a put are distinct, got {len(names) - len(set(names))} twice among {names[:5]}; put each row once")
        if tags is not None:
            check_tags(names, tags)
        columns = [] if fields is None else encode_columns(fields, len(names))
        if not columns and tags is None:
            raise ProtocolError(f"a put has columns or tags, got an empty mapping for {len(names)} keys; pass one of them")
        if not names:
            return
        request = PutRequest(self.writer, partition_id, names, [], None, None if tags is None else [dict(tag) for tag in tags], next(self._request_ids))
        places, size = _lay_out(columns)
        if not size:
            request.columns = [ColumnPut(column.name, column.spec, 0, column.lengths) for column in columns]
            await self._index.put(request)
            return
        segment, base = await self._reserve(size)
        try:
            await _copy_in(segment, base, columns, places, size)
            request.segment_id = segment.ref.segment_id
            request.columns = [ColumnPut(column.name, column.spec, base + place, column.lengths) for column, place in zip(columns, places, strict=True)]
            await self._index.put(request)
        except ProtocolError as error:
            if type(error) is ProtocolError and segment is self._current:  # perhaps the segment was taken away: start another
                self._retired.append(segment)
                self._current = None
            raise
        finally:
            segment.open_puts -= 1
            await self._try_seal()

    async def _reserve(self, size: int) -> tuple[SegmentWriter, int]:
        """A range of a lent segment. A put that fills most of one gets a segment of its own, so that small rows don't waste the rest."""
        try:
            async with asyncio.timeout(2 * self._config.put_timeout_s + 1):
                async with self._lock():
                    return await self._reserve_locked(size)
        except TimeoutError:
            raise StoreFull(
                f"a put waits at most {2 * self._config.put_timeout_s:g} s behind other puts of {self.writer}, got no room for {size} bytes"
            ) from None

    async def _reserve_locked(self, size: int) -> tuple[SegmentWriter, int]:
        start = None if self._current is None else self._current.reserve(size)
        if start is not None and self._current is not None:
            return self._current, start
        own_segment = 2 * size > standard_bytes(self._config)
        if not own_segment and self._current is not None:
            self._retired.append(self._current)
            self._current = None
            await self._seal_retired()
        borrowing = asyncio.ensure_future(self._borrow(size))
        try:
            segment = await asyncio.shield(borrowing)
        except asyncio.CancelledError:
            borrowing.add_done_callback(self._keep)
            raise
        if own_segment:
            self._retired.append(segment)
        else:
            self._current = segment
        start = segment.reserve(size)
        assert start is not None, "a lent segment has the room that was asked for"
        return segment, start

    async def _borrow(self, size: int) -> SegmentWriter:
        ref = await self._index.lend(self.writer, align(size), next(self._request_ids))
        if self._mapped is None:
            self._mapped = Mappings(await self._where(), writable=True)
        self._mapped.release_unlinked()
        known = self._mapped.known(ref)
        return SegmentWriter(await asyncio.to_thread(self._mapped.get, ref) if known is None else known, ref)

    def _keep(self, borrowing: asyncio.Future[SegmentWriter]) -> None:
        """A segment that arrived after its put was cancelled serves the next one."""
        if borrowing.cancelled() or borrowing.exception() is not None:
            return
        if self._current is None:
            self._current = borrowing.result()
        else:
            self._retired.append(borrowing.result())

    async def _try_seal(self) -> None:
        """As part of a put, whose own outcome counts: what can't be sealed now is sealed after the next one."""
        try:
            await self._seal_retired()
        except StreamrlError as error:
            log.warning("%s could not hand its full segments back yet: %s", self.writer, error)

    async def _seal_retired(self) -> None:
        """Hand full segments back once their last put is registered."""
        done = [segment for segment in self._retired if not segment.open_puts]
        if done:
            await self._index.seal(self.writer, [segment.ref.segment_id for segment in done])
            self._retired = [segment for segment in self._retired if segment not in done]

    async def _close(self) -> None:
        async with self._lock():
            if self._current is not None:
                self._retired.append(self._current)
                self._current = None
        await self._seal_retired()
        self._reader = self._mapped = None

    # ---- get, step by step --------------------------------------------------------------------------------------------------------------

    async def _get(self, keys: Sequence[str], partition_id: str, fields: Sequence[str] | None, optional: bool) -> Any:
        columns = await self._fetch(keys, partition_id, fields, optional)
        from tensordict import TensorDict

        offsets: dict[tuple[int, ...], Any] = {}
        batch = {column.name: decode_tensor(column, data, offsets) for column, data in columns}
        if optional:
            batch["presence"] = _presence(columns, fields, len(keys))
        return TensorDict(batch, batch_size=[len(keys)])

    async def _get_numpy(self, keys: Sequence[str], partition_id: str, fields: Sequence[str] | None) -> dict[str, list[Any]]:
        return {column.name: decode_rows(column, data) for column, data in await self._fetch(keys, partition_id, fields, False)}

    async def _fetch(self, keys: Sequence[str], partition_id: str, fields: Sequence[str] | None, optional: bool) -> list[tuple[LocatedColumn, np.ndarray]]:
        """Bytes of every column, copied once."""
        names = key_list(keys)
        if not names:
            raise ProtocolError("a get names at least one row, got no keys; skip empty batches")
        wanted = None if fields is None else list(dict.fromkeys(key_list(fields)))
        if self._reader is None:
            self._reader = SegmentReader(await self._where())
        for last in (False, False, True):
            located = await self._index.locate(partition_id, names, wanted, optional)
            try:
                buffers = await self._copy_out(self._reader, located)
                break
            except MissingKey:  # cleared, or only moved: the index tells
                if last:
                    raise
        if time.monotonic() - self._checked_unlinked > UNLINKED_CHECK_S:
            self._reader.mappings.release_unlinked()
            self._checked_unlinked = time.monotonic()
        return list(zip(located.columns, buffers, strict=True))

    @staticmethod
    async def _copy_out(reader: SegmentReader, located: Located) -> list[np.ndarray]:
        runs = [column.runs for column in located.columns]
        if sum(run[2] for column_runs in runs for run in column_runs) > THREAD_BYTES:
            return await asyncio.to_thread(reader.copy, runs, located.segments)
        return reader.copy(runs, located.segments)

    def _lock(self) -> asyncio.Lock:
        """Held while a segment is fetched; a lock serves one loop, and the store's loop may have been replaced."""
        loop = asyncio.get_running_loop()
        if self._lending[0] is not loop:
            self._lending = (loop, asyncio.Lock())
        return self._lending[1]

    async def _where(self) -> Path:
        if self._folder is None:
            self._folder = Path(await self._index.folder())
        return self._folder


def _lay_out(columns: list[EncodedColumn]) -> tuple[list[int], int]:
    """Aligned start of each column relative to the put's range, and the size of the range. Columns of the fixed kinds need no lengths."""
    places, end = [], 0
    for column in columns:
        places.append(align(end) if column.num_bytes else end)
        end = places[-1] + column.num_bytes
    return places, end


async def _copy_in(segment: SegmentWriter, base: int, columns: list[EncodedColumn], places: list[int], size: int) -> None:
    """Large copies run in a thread. A cancelled put waits for its copy, since the range may be lent again right after."""
    if size <= THREAD_BYTES:
        _write(segment, base, columns, places)
        return
    copying = asyncio.ensure_future(asyncio.to_thread(_write, segment, base, columns, places))
    try:
        await asyncio.shield(copying)
    finally:
        await asyncio.wait([copying])


def _write(segment: SegmentWriter, base: int, columns: list[EncodedColumn], places: list[int]) -> None:
    for column, place in zip(columns, places, strict=True):
        segment.write(base + place, column.chunks)


def _presence(columns: list[tuple[LocatedColumn, np.ndarray]], fields: Sequence[str] | None, num_rows: int) -> Any:
    import torch
    from tensordict import TensorDict

    found = {column.name: torch.tensor(column.present) for column, _ in columns}
    return TensorDict({name: found.get(name, torch.zeros(num_rows, dtype=torch.bool)) for name in (fields or found)}, batch_size=[num_rows])

"""The store's client: the kv verbs, with ``async_`` twins of the same meaning, and the trajectory face that the loops use.

A put copies its rows into the segment lent to this client and registers them with the index in one call; a get asks the index where the pieces
lie and copies them once, straight into the batch. No pickle anywhere. Each verb is one coroutine. The async verbs run it on the store's loop, the
plain ones in the calling thread when the index can be called from there (``direct``), else on that loop, or on a background loop when none was given.

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
from streamrl.dataplane.columns import EncodedColumn, decode_rows, decode_tensor, encode_columns, encode_row
from streamrl.dataplane.runner import InThread, LoopRunner, OnLoop, Way
from streamrl.dataplane.segments import Mappings, SegmentReader, SegmentWriter, align, standard_bytes
from streamrl.errors import MissingKey, ProtocolError, StoreFull, StreamrlError
from streamrl.protocol.fields import trajectory_columns
from streamrl.protocol.meta import KVBatchMeta
from streamrl.protocol.segments import ColumnPut, LocatedColumn, PutRequest
from streamrl.protocol.trajectory import Trajectory
from streamrl.telemetry.metrics import Metrics, NullMetrics

log = logging.getLogger(__name__)

UNLINKED_CHECK_S = 1.0


class Store:
    """One client of one node's store. ``writer`` names the process; segments are lent to ``<writer>#<random>``, so a restart is another writer.
    ``direct``: the same index over a BlockingChannel.

    >>> store.kv_put("A_0_0", "train", {"score": np.float32(1)}, {"seq_len": 7})          # doctest: +SKIP
    >>> store.kv_batch_get(["A_0_0"], "train")["score"]                                   # doctest: +SKIP
    tensor([1.])
    """

    def __init__(
        self,
        index: IndexCalls,
        *,
        writer: str,
        folder: Path | None,
        config: DataplaneConfig,
        loop: asyncio.AbstractEventLoop | None = None,
        direct: IndexCalls | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.writer = f"{writer}#{secrets.token_hex(4)}"
        self._index = index
        self._request_ids = itertools.count(1)
        self._config = config
        self._run = LoopRunner(loop, in_thread=direct is not None)
        self._on_loop: Way = OnLoop(index)
        self._elsewhere: Way = self._on_loop if direct is None else InThread(direct, self._run)
        self._metrics = metrics or NullMetrics()
        self._moved: dict[tuple[str, str], tuple[Any, Any]] = {}
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

    def kv_batch_put_by_meta(self, meta: KVBatchMeta, fields: Any) -> None:
        """Write columns of the rows of ``meta`` back, where these rows are."""
        self._run.wait(self._put(meta.keys, meta.partition_id, fields, None))

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
        return self._run.wait(self._tags(partition_id))

    async def async_kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        return await self._run.here(self._tags(partition_id))

    # ---- freeing ------------------------------------------------------------------------------------------------------------------------

    def kv_clear(self, keys: Sequence[str], partition_id: str) -> int:
        """Free rows and tags; unknown keys are ignored. The number freed."""
        return self._run.wait(self._clear(partition_id, key_list(keys), []))

    async def async_kv_clear(self, keys: Sequence[str], partition_id: str) -> int:
        return await self._run.here(self._clear(partition_id, key_list(keys), []))

    async def clear(self, keys: list[str]) -> int:
        """Free rows of the training partition. A uid among ``keys`` is a group that has ended: all its rows go, later writes are refused."""
        rows = [key for key in keys if "_" in key]
        groups = [key for key in keys if "_" not in key]
        return await self._run.here(self._clear("train", rows, groups))

    async def spill(self, groups: list[str]) -> int:
        """Move all rows of these groups (uids) of the training partition to disk, where they take no shared memory and read as before. Bytes moved;
        StoreFull when the disk has no room, and what was not moved stays in memory."""
        return await self._run.here(self._index.spill("train", [], groups))

    async def aclose(self) -> None:
        """Seal this client's segments. Rows stay readable for others."""
        await self._run.here(self._close())

    def close(self) -> None:
        """As :meth:`aclose`."""
        self._run.wait_for_loop(self._close())

    # ---- put, step by step --------------------------------------------------------------------------------------------------------------

    @property
    def _way(self) -> Way:
        """What fits the thread that runs this step."""
        return self._on_loop if self._run.is_here else self._elsewhere

    async def _put_row(self, key: str, partition_id: str, fields: Any, tag: dict[str, Any] | None) -> None:
        if fields is None and tag is None:
            raise ProtocolError(f"a put has fields or a tag, got neither for {key!r}; pass one of them")
        await self._put([key], partition_id, None if fields is None else encode_row(fields), None if tag is None else [tag])

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
        if names:
            request = PutRequest(self.writer, partition_id, names, [], None, None if tags is None else [dict(tag) for tag in tags], next(self._request_ids))
            await self._write(request, columns)

    async def _write(self, request: PutRequest, columns: list[EncodedColumn]) -> None:
        """Bytes into a segment, then everything into the index."""
        way, began = self._way, time.perf_counter()
        places, size = _lay_out(columns)
        if not size:
            request.columns = [ColumnPut(column.name, column.spec, 0, column.lengths) for column in columns]
            await way.index.put(request)
            return
        place = self._reserve_now(size)
        segment, base = place if place is not None else await way.on_loop(self._reserve(size))
        try:
            await way.copy(size, _copy_in, segment, base, columns, places)
            request.segment_id = segment.ref.segment_id
            request.columns = [ColumnPut(column.name, column.spec, base + place, column.lengths) for column, place in zip(columns, places, strict=True)]
            await way.index.put(request)
            self._meter("put", "shm", size, began)
        except ProtocolError as error:
            if type(error) is ProtocolError:  # perhaps the segment was taken away: start another
                await way.on_loop(self._retire(segment))
            raise
        finally:
            segment.release()
            if self._retired:
                await way.on_loop(self._try_seal())

    def _reserve_now(self, size: int) -> tuple[SegmentWriter, int] | None:
        """A range of the segment that this client has. None: it has none, or that one has no room."""
        segment = self._current
        start = None if segment is None else segment.reserve(size)
        return None if segment is None or start is None else (segment, start)

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
        found = self._reserve_now(size)
        if found is not None:
            return found
        own_segment = 2 * size > standard_bytes(self._config)
        if not own_segment and self._current is not None:
            await self._retire(self._current)
            await self._seal_retired()
        borrowing = asyncio.ensure_future(self._borrow(size))
        try:
            segment = await asyncio.shield(borrowing)
        except asyncio.CancelledError:
            borrowing.add_done_callback(self._keep)
            raise
        start = segment.reserve(size)
        assert start is not None, "a lent segment has the room that was asked for"
        if own_segment:
            await self._retire(segment)
        else:
            self._current = segment
        return segment, start

    async def _borrow(self, size: int) -> SegmentWriter:
        ref = await self._index.lend(self.writer, align(size), next(self._request_ids))
        if self._mapped is None:
            self._mapped = Mappings(await self._where(), writable=True)
        self._mapped.release_unlinked()
        known = self._mapped.known(ref)
        return SegmentWriter(await asyncio.to_thread(self._mapped.get, ref) if known is None else known, ref)

    async def _retire(self, segment: SegmentWriter) -> None:
        """It takes no more puts, and is sealed when the last of them is registered. On the loop, as all that changes which segments there are."""
        segment.retire()
        if segment not in self._retired:
            self._retired.append(segment)
        if segment is self._current:
            self._current = None

    def _keep(self, borrowing: asyncio.Future[SegmentWriter]) -> None:
        """A segment that arrived after its put was cancelled serves the next one."""
        if borrowing.cancelled() or borrowing.exception() is not None:
            return
        segment = borrowing.result()
        if self._current is None:
            self._current = segment
        else:
            segment.retire()
            self._retired.append(segment)

    async def _try_seal(self) -> None:
        """As part of a put, whose own outcome counts: what can't be sealed now is sealed after the next one."""
        try:
            await self._seal_retired()
        except StreamrlError as error:
            log.warning("%s could not hand its full segments back yet: %s", self.writer, error)

    async def _seal_retired(self) -> None:
        """Hand full segments back once their last put is registered."""
        done = [segment for segment in self._retired if segment.is_done]
        if done:
            await self._index.seal(self.writer, [segment.ref.segment_id for segment in done])
            self._retired = [segment for segment in self._retired if segment not in done]

    async def _close(self) -> None:
        async with self._lock():
            if self._current is not None:
                await self._retire(self._current)
        await self._seal_retired()
        self._reader = self._mapped = None

    # ---- get, step by step --------------------------------------------------------------------------------------------------------------

    async def _get(self, keys: Sequence[str], partition_id: str, fields: Sequence[str] | None, optional: bool) -> Any:
        columns = await self._fetch(keys, partition_id, fields, optional)
        return _as_batch(columns, len(keys), {"presence": _presence(columns, fields, len(keys))} if optional else {})

    async def _get_numpy(self, keys: Sequence[str], partition_id: str, fields: Sequence[str] | None) -> dict[str, list[Any]]:
        return {column.name: decode_rows(column, data) for column, data in await self._fetch(keys, partition_id, fields, False)}

    async def _fetch(self, keys: Sequence[str], partition_id: str, fields: Sequence[str] | None, optional: bool) -> list[tuple[LocatedColumn, np.ndarray]]:
        """Bytes of every column, copied once."""
        names = key_list(keys)
        if not names:
            raise ProtocolError("a get names at least one row, got no keys; skip empty batches")
        wanted = None if fields is None else list(dict.fromkeys(key_list(fields)))
        way, reader, began = self._way, self._reader, time.perf_counter()
        if reader is None:
            reader = self._reader = SegmentReader(await self._where())
        for last in (False, False, True):
            located = await way.index.locate(partition_id, names, wanted, optional)
            runs = [column.runs for column in located.columns]
            try:
                buffers = await way.copy(sum(run[2] for column_runs in runs for run in column_runs), reader.copy, runs, located.segments)
                break
            except MissingKey:  # cleared, or only moved: the index tells
                if last:
                    raise
        if time.monotonic() - self._checked_unlinked > UNLINKED_CHECK_S:
            reader.mappings.release_unlinked()
            self._checked_unlinked = time.monotonic()
        self._meter("get", "shm", sum(buffer.nbytes for buffer in buffers), began)
        return list(zip(located.columns, buffers, strict=True))

    def _meter(self, direction: str, transport: str, num_bytes: int, began: float) -> None:
        if (direction, transport) not in self._moved:
            labels = {"direction": direction, "transport": transport}
            bound = self._metrics.bound
            self._moved[direction, transport] = bound("streamrl_dataplane_bytes_total", **labels), bound("streamrl_dataplane_transfer_seconds", **labels)
        moved, seconds = self._moved[direction, transport]
        moved.inc(num_bytes)
        seconds.observe(time.perf_counter() - began)

    def _lock(self) -> asyncio.Lock:
        """Held while a segment is fetched; a lock serves one loop, and the store's loop may have been replaced."""
        loop = asyncio.get_running_loop()
        if self._lending[0] is not loop:
            self._lending = (loop, asyncio.Lock())
        return self._lending[1]

    async def _tags(self, partition_id: str | None) -> dict[str, dict[str, dict[str, Any]]]:
        return await self._way.index.tags(partition_id)

    async def _clear(self, partition_id: str, keys: list[str], groups: list[str]) -> int:
        return await self._way.index.clear(partition_id, keys, groups)

    async def _where(self) -> Path:
        if self._folder is None:
            self._folder = Path(await self._way.index.folder())
        return self._folder


def _lay_out(columns: list[EncodedColumn]) -> tuple[list[int], int]:
    """Aligned start of each column relative to the put's range, and the size of the range. Columns of the fixed kinds need no lengths."""
    places, end = [], 0
    for column in columns:
        places.append(align(end) if column.num_bytes else end)
        end = places[-1] + column.num_bytes
    return places, end


def _copy_in(segment: SegmentWriter, base: int, columns: list[EncodedColumn], places: list[int]) -> None:
    for column, place in zip(columns, places, strict=True):
        segment.write(base + place, column.chunks)


def _as_batch(columns: list[tuple[LocatedColumn, np.ndarray]], num_rows: int, further: dict[str, Any]) -> Any:
    """Every column has ``num_rows`` rows; a TensorDict that looks at them again takes as long as making them."""
    import torch
    from tensordict import TensorDict

    offsets: dict[tuple[int, ...], Any] = {}
    batch: dict[Any, Any] = {column.name: decode_tensor(column, data, offsets) for column, data in columns}
    return TensorDict._new_unsafe(batch | further, batch_size=torch.Size([num_rows]))


def _presence(columns: list[tuple[LocatedColumn, np.ndarray]], fields: Sequence[str] | None, num_rows: int) -> Any:
    import torch
    from tensordict import TensorDict

    found = {column.name: torch.tensor(column.present) for column, _ in columns}
    return TensorDict({name: found.get(name, torch.zeros(num_rows, dtype=torch.bool)) for name in (fields or found)}, batch_size=[num_rows])

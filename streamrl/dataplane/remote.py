"""One node's store as another node reads and writes it: a header and raw buffers each way, over a wire that only carries them.

    Get(partition, keys, fields)   ->   Answer(columns), one buffer a column, as a get on that node has them
    Put(partition, keys, columns) + one buffer a column   ->   Answer()

``StoreFace`` answers with a client of its own node, so a row is checked, refused and named as it is there. An answer above ``FRAME_BYTES`` is refused
with the number of parts to ask for, and a put is sent in such parts: the wire never holds a whole batch. Nothing is pickled. Knows no addresses, and
not which row is where: ``nodes.py`` does.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator

import msgspec
import numpy as np

from streamrl.dataplane.calls import IndexCalls
from streamrl.dataplane.columns import EncodedColumn, EncodedColumns, storage_dtype
from streamrl.dataplane.rows import Column
from streamrl.dataplane.store import Store
from streamrl.errors import ProtocolError, StreamrlError, from_wire, to_wire
from streamrl.protocol.fields import ColumnSpec
from streamrl.protocol.segments import LocatedColumn

log = logging.getLogger(__name__)

FRAME_BYTES = 32 << 20  # of one message: Ray's object store may be small, and several are on the way at a time
Buffers = list[np.ndarray]  # of uint8
Wire = Callable[[bytes, Buffers], Awaitable[tuple[bytes, Buffers]]]
Fetched = list[tuple[LocatedColumn, np.ndarray]]


class Head(msgspec.Struct, array_like=True):
    """A column whose bytes are in the buffer of the same place. ``present`` as in ``LocatedColumn``."""

    name: str
    spec: ColumnSpec
    lengths: list[int]
    present: list[bool] | None = None


class Get(msgspec.Struct, array_like=True, tag=True):
    """Rows in the order of their keys, as ``Store.kv_batch_get``."""

    partition_id: str
    keys: list[str]
    fields: list[str] | None
    optional: bool


class Put(msgspec.Struct, array_like=True, tag=True):
    """Columns for rows, as ``Store.kv_batch_put``. A repeat comes to the same."""

    partition_id: str
    keys: list[str]
    columns: list[Head]
    tags: list[dict] | None


class Answer(msgspec.Struct, array_like=True):
    """``parts`` above 1: too much for one message, ask for so many and for ``fields``."""

    error: tuple[str, str, str] | None = None
    columns: list[Head] = []
    parts: int = 1
    fields: list[str] = []


_ENCODER = msgspec.msgpack.Encoder()
_ASKED: msgspec.msgpack.Decoder[Get | Put] = msgspec.msgpack.Decoder(Get | Put)
_ANSWER = msgspec.msgpack.Decoder(Answer)


class StoreFace:
    """The serving end; ``store`` is a client of ``index`` on its node."""

    def __init__(self, store: Store, index: IndexCalls, frame_bytes: int = FRAME_BYTES) -> None:
        self._store = store
        self._index = index
        self._frame_bytes = frame_bytes

    async def answer(self, header: bytes, buffers: Buffers) -> tuple[bytes, Buffers]:
        """Errors travel in the answer, so that the caller sees what a caller here would."""
        try:
            answer, payload = await self._answer(_asked(header), buffers)
        except StreamrlError as error:
            answer, payload = Answer(to_wire(error)), []
        except Exception as error:  # the edge of the node
            log.exception("a request of another node failed")
            answer, payload = Answer(to_wire(error)), []
        return _ENCODER.encode(answer), payload

    async def _answer(self, asked: Get | Put, buffers: Buffers) -> tuple[Answer, Buffers]:
        match asked:
            case Get():
                return await self._get(asked)
            case Put(partition_id, keys, heads, tags):
                await self._store.async_kv_batch_put(keys, partition_id, None if not heads else _received(heads, buffers), tags)
                return Answer(), []

    async def _get(self, asked: Get) -> tuple[Answer, Buffers]:
        located = await self._index.locate(asked.partition_id, asked.keys, asked.fields, asked.optional)
        size = sum(run[2] for column in located.columns for run in column.runs)
        if size > self._frame_bytes and len(asked.keys) > 1:
            return Answer(parts=min(len(asked.keys), -(-size // self._frame_bytes)), fields=[column.name for column in located.columns]), []
        columns = await self._store._fetch(asked.keys, asked.partition_id, asked.fields, asked.optional)
        return Answer(columns=[Head(column.name, column.spec, column.lengths, column.present) for column, _ in columns]), [data for _, data in columns]


class RemoteStore:
    """The asking end, of one node."""

    def __init__(self, wire: Wire, frame_bytes: int = FRAME_BYTES) -> None:
        self._wire = wire
        self._frame_bytes = frame_bytes

    async def fetch(self, partition_id: str, keys: list[str], fields: list[str] | None, optional: bool) -> list[tuple[list[str], Fetched]]:
        """Portions of the rows, in order: their keys and their columns. The buffers are the wire's: read them, keep none."""
        answer, buffers = await self._ask(Get(partition_id, keys, fields, optional), [])
        if answer.parts == 1:
            return [(keys, _columns(answer.columns, buffers))]
        step = -(-len(keys) // answer.parts)
        portions = []
        for place in range(0, len(keys), step):  # one after another: that bounds what is on the way
            portions += await self.fetch(partition_id, keys[place : place + step], answer.fields, optional)
        return portions

    async def put(self, partition_id: str, keys: list[str], columns: EncodedColumns | None, tags: list[dict] | None) -> None:
        """All or nothing, for each part of ``frame_bytes``."""
        for begin, end in self._parts(len(keys), columns or EncodedColumns()):
            part = rows_of(columns, range(begin, end)) if columns is not None else EncodedColumns()
            heads = [Head(column.name, column.spec, column.lengths) for column in part]
            await self._ask(Put(partition_id, keys[begin:end], heads, None if tags is None else tags[begin:end]), [_joined(column) for column in part])

    async def _ask(self, asked: Get | Put, buffers: Buffers) -> tuple[Answer, Buffers]:
        header, payload = await self._wire(_ENCODER.encode(asked), buffers)
        answer = _ANSWER.decode(header)
        if answer.error is not None:
            raise from_wire(*answer.error)
        return answer, payload

    def _parts(self, num_rows: int, columns: EncodedColumns) -> Iterator[tuple[int, int]]:
        row_bytes = np.zeros(num_rows, np.int64)
        for column in columns:
            row_bytes += sizes_of(column.spec, column.lengths)
        begin = size = 0
        for row, num_bytes in enumerate(row_bytes.tolist()):
            if size and size + num_bytes > self._frame_bytes:
                yield begin, row
                begin, size = row, 0
            size += num_bytes
        yield begin, num_rows


def sizes_of(spec: ColumnSpec, lengths: list[int]) -> np.ndarray:
    """Bytes of each row of a column."""
    return np.asarray(Column(spec).sizes(lengths), np.int64)


def rows_of(columns: EncodedColumns, rows: range | list[int]) -> EncodedColumns:
    """These rows of the columns, as views."""
    return EncodedColumns(_select(column, rows) for column in columns)


def _select(column: EncodedColumn, rows: range | list[int]) -> EncodedColumn:
    lengths = [column.lengths[row] for row in rows]
    if len(column.chunks) == len(column.lengths) and column.spec.kind in ("ragged", "object"):
        return EncodedColumn(column.name, column.spec, lengths, [column.chunks[row] for row in rows])
    whole = _joined(column)
    ends = list(itertools.accumulate(sizes_of(column.spec, column.lengths).tolist(), initial=0))
    dtype = storage_dtype(column.spec.dtype) if column.spec.kind != "object" else np.dtype(np.uint8)
    return EncodedColumn(column.name, column.spec, lengths, [whole[ends[row] : ends[row + 1]].view(dtype) for row in rows])


def _joined(column: EncodedColumn) -> np.ndarray:
    """The bytes of a column, row after row."""
    chunks = [chunk.reshape(-1).view(np.uint8) for chunk in column.chunks if chunk.nbytes]
    return chunks[0] if len(chunks) == 1 else np.concatenate(chunks) if chunks else np.empty(0, np.uint8)


def _asked(header: bytes) -> Get | Put:
    try:
        return _ASKED.decode(header)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a request of another node has a known header, got: {error}; both sides must run one version") from error


def _received(heads: list[Head], buffers: Buffers) -> EncodedColumns:
    if len(heads) != len(buffers):
        raise ProtocolError(f"a put has one buffer per column, got {len(buffers)} for {len(heads)}; both sides must run one version")
    columns = EncodedColumns()
    for head, buffer in zip(heads, buffers, strict=True):
        if int(sizes_of(head.spec, head.lengths).sum()) != buffer.nbytes or any(length < 0 for length in head.lengths):
            raise ProtocolError(f"a buffer has the bytes of its column, got {buffer.nbytes} for {len(head.lengths)} rows of {head.name!r}; send them again")
        dtype = np.dtype(np.uint8) if head.spec.kind == "object" else storage_dtype(head.spec.dtype)
        columns.append(EncodedColumn(head.name, head.spec, head.lengths, [buffer.view(dtype)]))
    return columns


def _columns(heads: list[Head], buffers: Buffers) -> Fetched:
    if len(heads) != len(buffers):
        raise ProtocolError(f"an answer has one buffer per column, got {len(buffers)} for {len(heads)}; both sides must run one version")
    return [(LocatedColumn(head.name, head.spec, [], head.lengths, head.present), buffer) for head, buffer in zip(heads, buffers, strict=True)]


async def all_or_first_error(calls: list[Awaitable]) -> list:
    """Concurrently; when one fails the others are waited for, so that nothing goes on behind the caller's back."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results

"""The store of several nodes as one: the kv verbs of ``store.py``, each row on the node that generated it.

A row whose tag names its node (``NODE_TAG``, in a KVBatchMeta) is asked for there and nowhere else; for bare keys the nodes are asked who has them, and
of two rows under one key the later attempt counts. What lies on the own node is shared memory, as ever. Other nodes get one request each, at the same
time, and their rows are copied once, straight into the batch.

All or nothing holds for a put on each node (and there for each part, see ``remote.py``), not across nodes. Columns of a partition have one dtype on
each node; a get that would have to mix two is a DtypeClash. New rows go to the own node.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from streamrl.config.rollout import DataplaneConfig
from streamrl.dataplane.arguments import check_tags, key_list
from streamrl.dataplane.calls import IndexCalls
from streamrl.dataplane.columns import EncodedColumns, describe_spec, encode_columns
from streamrl.dataplane.remote import Fetched, RemoteStore, Wire, all_or_first_error, rows_of, sizes_of
from streamrl.dataplane.runner import THREAD_BYTES
from streamrl.dataplane.store import Store, _as_batch
from streamrl.errors import DtypeClash, MissingField, MissingKey, ProtocolError, StreamrlError
from streamrl.protocol.fields import NODE_TAG
from streamrl.protocol.meta import KVBatchMeta
from streamrl.protocol.segments import Located, LocatedColumn, PutRequest, SegmentRef, StoreUse
from streamrl.telemetry.metrics import Metrics

Column = tuple[LocatedColumn, np.ndarray]


class NodeIndexes:
    """``IndexCalls`` over the indexes of all nodes: rows of the own node (``home``; None: it has no store) are put and located, the rest is for all."""

    def __init__(self, indexes: dict[str, IndexCalls], home: str | None) -> None:
        self._all = indexes
        self._home = home

    @property
    def home(self) -> IndexCalls:
        if self._home is None:
            raise ProtocolError("new rows are put on a node with a store, got a node without one; put them from a rollout actor")
        return self._all[self._home]

    async def folder(self) -> str:
        return await self.home.folder()

    async def lend(self, writer: str, num_bytes: int, request_id: int) -> SegmentRef:
        return await self.home.lend(writer, num_bytes, request_id)

    async def seal(self, writer: str, segment_ids: list[int]) -> None:
        await self.home.seal(writer, segment_ids)

    async def put(self, request: PutRequest) -> None:
        await self.home.put(request)

    async def locate(self, partition_id: str, keys: list[str], fields: list[str] | None, optional: bool) -> Located:
        return await self.home.locate(partition_id, keys, fields, optional)

    async def use(self) -> StoreUse:
        return await self.home.use()

    async def holders(self, partition_id: str, keys: list[str]) -> list[str | None]:
        """The node of each row."""
        answers = dict(zip(self._all, await all_or_first_error([index.attempts(partition_id, keys) for index in self._all.values()]), strict=True))
        best: list[tuple[int, str] | None] = [None] * len(keys)
        for node, attempts in answers.items():
            for place, attempt in enumerate(attempts):
                held = best[place]
                if attempt is not None and (held is None or attempt > held[0]):
                    best[place] = (attempt, node)
        return [None if held is None else held[1] for held in best]

    async def attempts(self, partition_id: str, keys: list[str]) -> list[int | None]:
        answers = await all_or_first_error([index.attempts(partition_id, keys) for index in self._all.values()])
        return [max((attempt for attempt in row if attempt is not None), default=None) for row in zip(*answers, strict=True)]

    async def tags(self, partition_id: str | None) -> dict[str, dict[str, dict[str, Any]]]:
        merged: dict[str, dict[str, dict[str, Any]]] = {}
        for answer in await all_or_first_error([index.tags(partition_id) for index in self._all.values()]):
            for name, rows in answer.items():
                known = merged.setdefault(name, {})
                known |= {key: tag for key, tag in rows.items() if key not in known or tag.get("attempt", -1) > known[key].get("attempt", -1)}
        return merged

    async def clear(self, partition_id: str, keys: list[str], groups: list[str]) -> int:
        return sum(await all_or_first_error([index.clear(partition_id, keys, groups) for index in self._all.values()]))

    async def spill(self, partition_id: str, keys: list[str], groups: list[str]) -> int:
        return sum(await all_or_first_error([index.spill(partition_id, keys, groups) for index in self._all.values()]))

    async def writer_gone(self, writer: str) -> int:
        return sum(await all_or_first_error([index.writer_gone(writer) for index in self._all.values()]))


class NodeStore(Store):
    """``indexes`` and ``wires`` by name of the node's store; ``home`` has no wire."""

    def __init__(
        self,
        indexes: dict[str, IndexCalls],
        wires: dict[str, Wire],
        *,
        home: str | None,
        writer: str,
        config: DataplaneConfig,
        loop: asyncio.AbstractEventLoop | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._nodes = NodeIndexes(indexes, home)
        super().__init__(self._nodes, writer=writer, folder=None, config=config, loop=loop, metrics=metrics)
        self._home = home
        self._fallback = home or next(iter(indexes))  # of rows that nobody has
        self._remotes = {name: RemoteStore(wire) for name, wire in wires.items()}

    # ---- by meta: its tags say where

    def kv_batch_get_by_meta(self, meta: KVBatchMeta) -> Any:
        return self._run.wait(self._get_at(meta))

    async def async_kv_batch_get_by_meta(self, meta: KVBatchMeta) -> Any:
        return await self._run.here(self._get_at(meta))

    def kv_batch_put_by_meta(self, meta: KVBatchMeta, fields: Any) -> None:
        self._run.wait(self._put_by_meta(meta, fields))

    async def _get_at(self, meta: KVBatchMeta) -> Any:
        return _as_batch(await self._fetch_at(meta.keys, await self._named(meta), meta.partition_id, meta.fields, False), len(meta.keys), {})

    async def _put_by_meta(self, meta: KVBatchMeta, fields: Any) -> None:
        await self._put_at(meta.keys, await self._named(meta), meta.partition_id, fields, None)

    async def _named(self, meta: KVBatchMeta) -> list[str]:
        named = [tag.get(NODE_TAG) for tag in meta.tags]
        unknown = {node for node in named if node is not None} - {self._home, *self._remotes}
        if unknown:
            raise MissingKey(f"rows lie on nodes of this run, got {sorted(map(str, unknown))} in the tags; known: {sorted({*self._remotes, self._fallback})}")
        return [node or self._fallback for node in named] if all(named) else await self._holders(meta.partition_id, meta.keys)

    async def _holders(self, partition_id: str, keys: list[str]) -> list[str]:
        return [node or self._fallback for node in await self._nodes.holders(partition_id, keys)]

    # ---- put

    async def _put(self, keys: Sequence[str], partition_id: str, fields: Any, tags: Sequence[dict[str, Any]] | None) -> None:
        names = key_list(keys)
        await self._put_at(names, await self._holders(partition_id, names), partition_id, fields, tags)

    async def _put_at(self, names: list[str], nodes: list[str], partition_id: str, fields: Any, tags: Sequence[dict[str, Any]] | None) -> None:
        """What can be checked without the rows is checked before anything is sent."""
        used = dict.fromkeys(nodes)
        if not names or list(used) == [self._home]:
            await super()._put(names, partition_id, fields, tags)
            return
        if fields is None and tags is None:
            raise ProtocolError(f"a put has fields or tags, got neither for {len(names)} keys; pass one of them")
        if len(set(names)) != len(names):
            raise ProtocolError(f"keys of a put are distinct, got {len(names) - len(set(names))} twice among {names[:5]}; put each row once")
        if tags is not None:
            check_tags(names, tags)
        columns = EncodedColumns() if fields is None else EncodedColumns(encode_columns(fields, len(names)))
        await all_or_first_error([self._put_on(node, *_part(node, names, nodes, columns, tags), partition_id) for node in used])

    async def _put_on(self, node: str, keys: list[str], columns: EncodedColumns, tags: list[dict[str, Any]] | None, partition_id: str) -> None:
        if node == self._home:
            await super()._put(keys, partition_id, columns or None, tags)
        else:
            began = time.perf_counter()
            await self._remotes[node].put(partition_id, keys, columns, tags)
            self._meter("put", "ray", sum(column.num_bytes for column in columns), began)

    # ---- get

    async def _fetch(self, keys: Sequence[str], partition_id: str, fields: Sequence[str] | None, optional: bool) -> Fetched:
        names = key_list(keys)
        return await self._fetch_at(names, await self._holders(partition_id, names), partition_id, fields, optional)

    async def _fetch_at(self, names: list[str], nodes: list[str], partition_id: str, fields: Sequence[str] | None, optional: bool) -> Fetched:
        used = list(dict.fromkeys(nodes))
        if used in ([], [self._home]):
            return await super()._fetch(names, partition_id, fields, optional)
        wanted = None if fields is None else list(dict.fromkeys(key_list(fields)))
        places = {node: [place for place, name in enumerate(nodes) if name == node] for node in used}
        answers = await all_or_first_error([self._fetch_from(node, [names[place] for place in places[node]], partition_id, wanted, optional) for node in used])
        parts: list[tuple[list[int], Fetched]] = []
        for node, answer in zip(used, answers, strict=True):
            done = 0
            for keys, columns in answer:
                parts.append((places[node][done : done + len(keys)], columns))
                done += len(keys)
        if sum(data.nbytes for _, columns in parts for _, data in columns) > THREAD_BYTES:
            return await asyncio.to_thread(_assemble, parts, len(names), wanted, optional)
        return _assemble(parts, len(names), wanted, optional)

    async def _fetch_from(self, node: str, keys: list[str], partition_id: str, fields: list[str] | None, optional: bool) -> list[tuple[list[str], Fetched]]:
        try:
            if node == self._home:
                return [(keys, await super()._fetch(keys, partition_id, fields, optional))]
            began = time.perf_counter()
            portions = await self._remotes[node].fetch(partition_id, keys, fields, optional)
            self._meter("get", "ray", sum(data.nbytes for _, columns in portions for _, data in columns), began)
            return portions
        except StreamrlError as error:
            error.add_note(f"on the node of {node}")
            raise


def _part(node: str, names: list[str], nodes: list[str], columns: EncodedColumns, tags: Sequence[dict[str, Any]] | None) -> tuple[Any, Any, Any]:
    """Keys, columns and tags of one node."""
    rows = [place for place, name in enumerate(nodes) if name == node]
    return [names[row] for row in rows], rows_of(columns, rows), None if tags is None else [dict(tags[row]) for row in rows]


def _assemble(parts: list[tuple[list[int], Fetched]], num_rows: int, fields: list[str] | None, optional: bool) -> Fetched:
    """Rows of several answers in the asked order: (places of an answer's rows, its columns) into one buffer a column."""
    answers = [(places, {column.name: (column, data) for column, data in columns}) for places, columns in parts]
    first = list(answers[0][1])
    if optional and fields is not None:
        names = [name for name in fields if any(name in columns for _, columns in answers)]
    else:
        names = [name for name in (fields or first) if all(name in columns for _, columns in answers)]
    if not names and fields is None:
        raise MissingField("rows of a get share a column, got none common to the rows of all nodes; select fields")
    return [_assemble_column(name, [(places, columns[name]) for places, columns in answers if name in columns], num_rows, optional) for name in names]


def _assemble_column(name: str, parts: list[tuple[list[int], Column]], num_rows: int, optional: bool) -> Column:
    spec = parts[0][1][0].spec
    lengths, present = [0] * num_rows, [False] * num_rows
    for places, (column, _) in parts:
        if column.spec != spec:
            raise DtypeClash(f"column {name!r} is one kind on all nodes, got {describe_spec(spec)} and {describe_spec(column.spec)}; values are never cast")
        for row, place in enumerate(places):
            lengths[place] = column.lengths[row]
            present[place] = column.present is None or column.present[row]
    starts = np.concatenate(([0], np.cumsum(sizes_of(spec, lengths)))).tolist()
    out = np.zeros(starts[-1], np.uint8) if optional else np.empty(starts[-1], np.uint8)
    for places, (column, data) in parts:
        _copy_rows(out, starts, places, data, np.concatenate(([0], np.cumsum(sizes_of(spec, column.lengths)))).tolist())
    return LocatedColumn(name, spec, [], lengths, present if optional else None), out


def _copy_rows(out: np.ndarray, starts: list[int], places: list[int], data: np.ndarray, ends: list[int]) -> None:
    """Rows that are neighbours on both sides go in one copy."""
    begin = 0
    for row in range(1, len(places) + 1):
        if row == len(places) or places[row] != places[row - 1] + 1:
            out[starts[places[begin]] : starts[places[row - 1] + 1]] = data[ends[begin] : ends[row]]
            begin = row

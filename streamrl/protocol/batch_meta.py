"""BatchMeta: where a batch lies and what its columns look like. A KVBatchMeta is resolved to one on the controller, once, before dispatch.

Row lists (indexes, partitions, status, tags, per-row shapes) always have one entry per row and move together. Holds no tensors and needs no
torch. The schema's shapes are those of the whole column: (B,) is one scalar per row, (B, None) a ragged column.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from streamrl.errors import MissingField, ProtocolError, RowOutOfRange
from streamrl.protocol.equality import deep_equal
from streamrl.protocol.meta import check_distinct, check_permutation, even_parts

log = logging.getLogger(__name__)


class FieldSchema(msgspec.Struct, frozen=True):
    """One column. ``shape`` begins with B and has None at the ragged axis; ``per_sample_shapes`` is given for ragged columns only.

    Worked example: three answers of 3, 5 and 4 tokens: ``shape=(3, None), ragged_dim=1, per_sample_shapes=[(3,), (5,), (4,)]``.
    """

    dtype: str  # torch name without the prefix, or "object"
    shape: tuple[int | None, ...]
    ragged_dim: int | None = None  # axis of the column, 1 or more
    is_scalar: bool = False  # shape (B,)
    is_non_tensor: bool = False
    per_sample_shapes: list[tuple[int, ...]] | None = None

    def rows(self, picked: Sequence[int]) -> FieldSchema:
        """The schema of these rows of the column."""
        shapes = None if self.per_sample_shapes is None else [self.per_sample_shapes[i] for i in picked]
        return msgspec.structs.replace(self, shape=(len(picked), *self.shape[1:]), per_sample_shapes=shapes)

    def same_kind(self, other: FieldSchema) -> bool:
        """True when rows of both can stand in one column."""
        mine = (self.dtype, self.shape[1:], self.ragged_dim, self.is_scalar, self.is_non_tensor)
        return mine == (other.dtype, other.shape[1:], other.ragged_dim, other.is_scalar, other.is_non_tensor)


class SampleMeta(msgspec.Struct, frozen=True):
    """One row of a BatchMeta, read-only."""

    global_index: int
    partition_id: str
    production_status: int
    shapes: MappingProxyType[str, tuple[int, ...]]
    tag: MappingProxyType[str, Any]


class BatchMeta(msgspec.Struct):
    """Rows by their physical index. ``production_status[i]`` is 1 when all columns of row i are there (fits int8)."""

    global_indexes: list[int] = []
    partition_ids: list[str] = []
    field_schema: dict[str, FieldSchema] = {}
    production_status: list[int] | None = None  # None: nothing is produced yet
    extra_info: dict[str, Any] | None = None
    custom_meta: list[dict[str, Any]] | None = None  # the rows' tags; None: empty tags
    backend_meta: list[dict[str, Any]] | None = None  # private to the store that made this batch

    def __post_init__(self) -> None:
        size = len(self.global_indexes)
        self.global_indexes, self.partition_ids = [int(i) for i in self.global_indexes], list(self.partition_ids)
        self.field_schema = dict(self.field_schema)
        self.production_status = [0] * size if self.production_status is None else [int(s) for s in self.production_status]
        self.extra_info = copy.deepcopy(self.extra_info) if self.extra_info else {}
        self.custom_meta = [{} for _ in range(size)] if self.custom_meta is None else [dict(tag) for tag in self.custom_meta]
        self.backend_meta = [{} for _ in range(size)] if self.backend_meta is None else [dict(m) for m in self.backend_meta]
        self._check(size)

    def _check(self, size: int) -> None:
        lists = {name: len(getattr(self, name)) for name in ("partition_ids", "production_status", "custom_meta", "backend_meta")}
        for name, schema in self.field_schema.items():
            lists[f"field_schema[{name!r}].shape[0]"] = schema.shape[0] if schema.shape and schema.shape[0] is not None else -1
            if schema.per_sample_shapes is not None:
                lists[f"field_schema[{name!r}].per_sample_shapes"] = len(schema.per_sample_shapes)
            if schema.is_scalar and len(schema.shape) != 1:
                raise ProtocolError(f"a scalar column has shape (B,), got {schema.shape} for {name!r}; declare it dense or squeeze it")
        wrong = {name: got for name, got in lists.items() if got != size}
        if wrong:
            raise ProtocolError(f"a BatchMeta has one entry per row, got {size} global_indexes and {wrong}; pass them together")
        check_distinct("global_indexes", [str(i) for i in self.global_indexes])

    def __len__(self) -> int:
        return len(self.global_indexes)

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self)

    @property
    def field_names(self) -> list[str]:
        """Column names, sorted."""
        return sorted(self.field_schema)

    @property
    def is_ready(self) -> bool:
        """True when there are rows and all of them are produced."""
        return len(self) > 0 and all(status == 1 for status in self.production_status or [])

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """Exactly ``chunks`` parts in order; sizes differ by at most one and the earlier parts are the bigger ones."""
        return [self._rows(part) for part in even_parts(len(self), chunks)]

    def chunk_by_partition(self) -> list[BatchMeta]:
        """One part per partition, in order of first appearance; rows keep their order."""
        rows: dict[str, list[int]] = {}
        for i, partition in enumerate(self.partition_ids):
            rows.setdefault(partition, []).append(i)
        return [self._rows(part) for part in rows.values()]

    def union(self, other: BatchMeta) -> BatchMeta:
        """The columns of both for the same rows; ``other`` wins per column, a row is produced when it is in both."""
        if self.global_indexes != other.global_indexes or self.partition_ids != other.partition_ids:
            raise ProtocolError(
                f"union joins columns of the same rows, got {len(self)} and {len(other)} rows with other indexes or partitions; use concat to add rows"
            )
        status = [int(a == 1 and b == 1) for a, b in zip(self.production_status or [], other.production_status or [], strict=True)]
        return BatchMeta(
            self.global_indexes,
            self.partition_ids,
            self.field_schema | other.field_schema,
            status,
            {**(self.extra_info or {}), **(other.extra_info or {})},
            [a | b for a, b in zip(self.custom_meta or [], other.custom_meta or [], strict=True)],
            [a | b for a, b in zip(self.backend_meta or [], other.backend_meta or [], strict=True)],
        )

    @classmethod
    def concat(cls, data: Sequence[BatchMeta]) -> BatchMeta:
        """Rows of all parts in order; parts without rows are skipped. Columns, their dtypes and ``extra_info`` must agree."""
        parts = [part for part in data if len(part)]
        if not parts:
            log.warning("concat of %d batch metas without a row gives an empty meta", len(data))
            return cls()
        for i, part in enumerate(parts):
            if not deep_equal(part.extra_info, parts[0].extra_info):
                raise ProtocolError(
                    f"extra_info is equal in all parts of a concat, got {parts[0].extra_info} in part 0 and {part.extra_info} in part {i}; drop it first"
                )
        return cls(
            [i for part in parts for i in part.global_indexes],
            [p for part in parts for p in part.partition_ids],
            _joined_schema(parts),
            [s for part in parts for s in part.production_status or []],
            parts[0].extra_info,
            [tag for part in parts for tag in part.custom_meta or []],
            [m for part in parts for m in part.backend_meta or []],
        )

    def reorder(self, indices: Sequence[int]) -> None:
        """Put row ``indices[i]`` at place i, in place; ``indices`` is a permutation."""
        moved = self._rows(check_permutation(indices, len(self)))
        for name in self.__struct_fields__:
            setattr(self, name, getattr(moved, name))

    def select_fields(self, names: Sequence[str]) -> BatchMeta:
        """The same rows with these columns only."""
        unknown = [name for name in names if name not in self.field_schema]
        if unknown:
            raise MissingField(f"the batch has the columns {self.field_names}, got a request for {unknown}; check the names")
        chosen = {name: self.field_schema[name] for name in names}
        return msgspec.structs.replace(self, field_schema=chosen)

    def per_sample(self, row: int) -> SampleMeta:
        """Row ``row``, read-only."""
        if not 0 <= row < len(self):
            raise RowOutOfRange(f"row numbers lie in 0..{len(self) - 1}, got {row}; count rows from 0")
        shapes = {name: _row_shape(schema, row) for name, schema in self.field_schema.items()}
        tags, status = self.custom_meta or [], self.production_status or []
        return SampleMeta(self.global_indexes[row], self.partition_ids[row], status[row], MappingProxyType(shapes), MappingProxyType(dict(tags[row])))

    def _rows(self, picked: Sequence[int]) -> BatchMeta:
        status, tags, backend = self.production_status or [], self.custom_meta or [], self.backend_meta or []
        return BatchMeta(
            [self.global_indexes[i] for i in picked],
            [self.partition_ids[i] for i in picked],
            {name: schema.rows(picked) for name, schema in self.field_schema.items()},
            [status[i] for i in picked],
            self.extra_info,
            [tags[i] for i in picked],
            [backend[i] for i in picked],
        )


def _row_shape(schema: FieldSchema, row: int) -> tuple[int, ...]:
    if schema.per_sample_shapes is not None:
        return schema.per_sample_shapes[row]
    return tuple(n for n in schema.shape[1:] if n is not None)


def _joined_schema(parts: Sequence[BatchMeta]) -> dict[str, FieldSchema]:
    first = parts[0].field_schema
    for i, part in enumerate(parts):
        differing = sorted(part.field_schema.keys() ^ first.keys()) or [n for n, schema in first.items() if not schema.same_kind(part.field_schema[n])]
        if differing:
            raise ProtocolError(f"columns and their dtypes agree in all parts of a concat, got {differing} differing between part 0 and part {i}; select first")
    return {name: _joined_field([part.field_schema[name] for part in parts]) for name in first}


def _joined_field(schemas: Sequence[FieldSchema]) -> FieldSchema:
    rows = sum(schema.shape[0] or 0 for schema in schemas)
    known = all(schema.per_sample_shapes is not None for schema in schemas)
    shapes = list(itertools.chain.from_iterable(schema.per_sample_shapes or [] for schema in schemas)) if known else None
    return msgspec.structs.replace(schemas[0], shape=(rows, *schemas[0].shape[1:]), per_sample_shapes=shapes)

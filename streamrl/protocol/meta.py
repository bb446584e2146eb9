"""KVBatchMeta: a batch as keys and tags. It holds no tensors; every row move moves keys and tags together.

Guarantees distinct keys, one tag dict of plain values per key, and an ``extra_info`` that is always a dict and never shared between
two metas. Does not know which columns a key has: an unknown field name is found by the store, at the get.
"""

from __future__ import annotations

import copy
import itertools
import logging
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from streamrl.errors import ProtocolError, RowOutOfRange, WrongType

log = logging.getLogger(__name__)

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


class UnknownKeys(ProtocolError, RuntimeError, KeyError):
    """select_keys was asked for keys that the batch does not hold."""


class KVBatchMeta(msgspec.Struct):
    """Rows of one partition: ``tags[i]`` describes ``keys[i]``; ``fields=None`` means all columns common to the rows.

    >>> meta = KVBatchMeta("train", ["A_0_0", "A_1_0"], [{"seq_len": 7}, {"seq_len": 9}])
    >>> meta.select_keys(["A_1_0"]).tags
    [{'seq_len': 9}]
    """

    partition_id: str
    keys: list[str] = []
    tags: list[dict[str, Any]] = []
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_names("keys", self.keys)
        check_names("fields", self.fields or [])
        self.keys, self.tags = list(self.keys), list(self.tags)
        self.fields = None if self.fields is None else list(self.fields)
        self.extra_info = copy.deepcopy(self.extra_info) if self.extra_info else {}
        if len(self.keys) != len(self.tags):
            raise ProtocolError(f"one tag dict per key, got {len(self.keys)} keys and {len(self.tags)} tags; pass them together")
        check_distinct("keys", self.keys)
        if self.fields is not None:
            check_distinct("fields", self.fields)
        check_tags(self.keys, self.tags)
        self.tags = _copies(self.tags)

    def __len__(self) -> int:
        return len(self.keys)

    def select_keys(self, keys: Sequence[str]) -> KVBatchMeta:
        """The rows ``keys``, in that order."""
        check_names("keys", keys)
        place = dict(zip(self.keys, range(len(self)), strict=True))
        try:
            rows = [place[key] for key in keys]
        except KeyError:
            unknown = [key for key in keys if key not in place]
            raise UnknownKeys(f"select_keys takes keys of the batch, got unknown {unknown}; list them with .keys") from None
        if len(set(rows)) != len(rows):
            check_distinct("keys", keys)
        part = self._part([], [])
        copies = _copies(self.tags)  # of all, in the order of memory: copying in the order asked for costs a cache miss per value
        part.keys, part.tags = list(keys), [copies[row] for row in rows]
        return part

    def reorder(self, indices: Sequence[int]) -> None:
        """Put row ``indices[i]`` at place i, in place; ``indices`` is a permutation."""
        order = check_permutation(indices, len(self))
        self.keys, self.tags = [self.keys[i] for i in order], [self.tags[i] for i in order]

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """Exactly ``chunks`` parts in order; sizes differ by at most one and the earlier parts are the bigger ones."""
        parts = [slice(part.start, part.stop) for part in even_parts(len(self), chunks)]
        return [self._part(self.keys[part], self.tags[part]) for part in parts]

    @classmethod
    def concat(cls, data: Sequence[KVBatchMeta]) -> KVBatchMeta:
        """Rows appended in order. Parts without rows are skipped; ``extra_info`` is the union, and equal where two parts have a key."""
        parts = [part for part in data if len(part)]
        if not parts:
            log.warning("concat of %d metas without a row gives an empty meta", len(data))
            return cls(data[0].partition_id if data else "")
        _check_one_partition(parts)
        keys = [key for part in parts for key in part.keys]
        check_distinct("keys", keys)
        joined = cls(parts[0].partition_id, [], [], _common_fields(parts), _merged_info(parts))
        joined.keys, joined.tags = keys, _copies(tag for part in parts for tag in part.tags)
        return joined

    def with_fields(self, names: Sequence[str] | None) -> KVBatchMeta:
        """A copy that selects the columns ``names`` (None: all columns common to the rows)."""
        check_names("fields", names or [])
        chosen = self._part(list(self.keys), self.tags)
        chosen.fields = None if names is None else list(names)
        check_distinct("fields", chosen.fields or [])
        return chosen

    def _part(self, keys: list[str], tags: Iterable[dict[str, Any]]) -> KVBatchMeta:
        """Distinct rows of this meta; their keys and tags were checked when it was built."""
        part = KVBatchMeta(self.partition_id, [], [], self.fields, self.extra_info)
        part.keys, part.tags = keys, _copies(tags)
        return part


def _copies(tags: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return list(map(dict.copy, tags))


def check_names(what: str, names: Any) -> None:
    """WrongType for a single name, which Python would take for a list of letters."""
    if isinstance(names, str | bytes):
        raise WrongType(f"{what} of a batch are a list of names, got {names!r:.80}; pass [{names!r:.80}]")


def check_int(operation: str, number: Any) -> int:
    """WrongType for what Python can't count with; True and False count nothing."""
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise WrongType(f"{operation} takes a whole number, got {number!r:.80}; pass an int")
    return operator.index(number)


def check_distinct(what: str, names: Sequence[str]) -> None:
    """ProtocolError listing the names that occur twice."""
    if len(set(names)) != len(names):
        seen: set[str] = set()
        twice = sorted({str(name) for name in names if name in seen or seen.add(name)})  # type: ignore[func-returns-value]
        raise ProtocolError(f"{what} of a batch are distinct, got duplicates of {twice}; remove them")


def check_tags(keys: Sequence[str], tags: Sequence[dict[str, Any]]) -> None:
    """Tag values are plain and immutable, so that one level of copying keeps two batches apart."""
    if not set(map(type, tags)) <= {dict}:
        raise WrongType(f"a tag is a dict, got {sorted({type(tag).__name__ for tag in tags})}; pass one dict per key")
    if set(map(type, itertools.chain.from_iterable(map(dict.values, tags)))) <= _PLAIN:
        return
    for key, tag in zip(keys, tags, strict=True):
        bad = {name: type(value).__name__ for name, value in tag.items() if type(value) not in _PLAIN}
        if bad:
            raise ProtocolError(f"tag values are None, bool, int, float, str or bytes, got {bad} in the tag of {key!r}; store structures as object columns")


def check_permutation(indices: Sequence[int], size: int) -> list[int]:
    """``indices`` as a list when it holds every number of 0..size-1 once."""
    try:
        given = indices if isinstance(indices, list | range) else list(indices)
        order = [operator.index(i) for i in given]
    except TypeError as error:
        raise WrongType(f"reorder takes a 1-D list of row numbers, got {error}; pass integers") from error
    if bool in set(map(type, given)):
        raise WrongType("reorder takes row numbers, got a boolean mask; pass integers, or select rows by a mask")
    if len(order) != size:
        raise ProtocolError(f"reorder takes a permutation of all rows, got {len(order)} indices for {size} rows; use select to drop or repeat rows")
    outside = [i for i in order if not 0 <= i < size]
    if outside:
        raise RowOutOfRange(f"reorder takes row numbers 0..{size - 1}, got {outside}; count rows from 0")
    if len(set(order)) != size:
        raise ProtocolError(f"reorder takes every row once, got {size - len(set(order))} duplicate indices for {size} rows; use select to repeat rows")
    return order


def even_parts(size: int, chunks: int) -> list[range]:
    """Row ranges of exactly ``chunks`` parts whose sizes differ by at most one, earlier parts bigger.

    >>> [len(part) for part in even_parts(10, 4)]
    [3, 3, 2, 2]
    """
    if check_int("chunk", chunks) < 1:
        raise ProtocolError(f"chunk takes a number of parts of at least 1, got {chunks}; pass the number of ranks")
    if size < chunks:
        log.warning("chunk of %d rows in %d parts leaves %d parts empty", size, chunks, chunks - size)
    small, extra = divmod(size, chunks)
    starts = [part * small + min(part, extra) for part in range(chunks + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def _check_one_partition(parts: Sequence[KVBatchMeta]) -> None:
    partitions = sorted({part.partition_id for part in parts})
    if len(partitions) > 1:
        raise ProtocolError(f"concat takes metas of one partition, got {partitions}; concatenate each partition by itself")


def _common_fields(parts: Sequence[KVBatchMeta]) -> list[str] | None:
    chosen = [part.fields for part in parts if part.fields is not None]
    for fields in chosen:
        if set(fields) != set(chosen[0]):
            raise ProtocolError(f"concat takes metas that select the same fields, got {sorted(chosen[0])} and {sorted(fields)}; use with_fields first")
    return chosen[0] if chosen else None


def _merged_info(parts: Sequence[KVBatchMeta]) -> dict[str, Any]:
    from streamrl.protocol.equality import deep_equal  # numpy is needed only here

    infos = [part.extra_info or {} for part in parts]
    if any(info.keys() != infos[0].keys() for info in infos):
        log.warning("concat of metas with differing extra_info keys %s keeps the union", [sorted(info) for info in infos])
    merged: dict[str, Any] = {}
    for info in infos:
        for name, value in info.items():
            if name in merged and not deep_equal(merged[name], value):
                raise ProtocolError(f"extra_info agrees in all parts of a concat, got {merged[name]!r} and {value!r} for {name!r}; rename or drop the key")
            merged[name] = value
    return merged

"""KVBatchMeta: a batch as keys and tags. It holds no tensors; every row move moves keys and tags together."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from streamrl.errors import ProtocolError

log = logging.getLogger(__name__)


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
        self.keys, self.tags = list(self.keys), [dict(t) for t in self.tags]
        self.fields = None if self.fields is None else list(self.fields)
        self.extra_info = copy.deepcopy(self.extra_info) if self.extra_info else {}
        if len(self.keys) != len(self.tags):
            raise ProtocolError(f"one tag dict per key, got {len(self.keys)} keys and {len(self.tags)} tags; pass them together")
        if len(set(self.keys)) != len(self.keys):
            raise ProtocolError(f"keys of a batch are distinct, got {len(self.keys) - len(set(self.keys))} duplicates; remove them")
        if self.fields is not None and len(set(self.fields)) != len(self.fields):
            raise ProtocolError(f"fields of a batch are distinct, got {self.fields}; remove the duplicates")

    def __len__(self) -> int:
        return len(self.keys)

    def select_keys(self, keys: Sequence[str]) -> KVBatchMeta:
        """The rows ``keys``, in that order."""
        place = {key: i for i, key in enumerate(self.keys)}
        unknown = [key for key in keys if key not in place]
        if unknown:
            raise UnknownKeys(f"select_keys takes keys of the batch, got unknown {unknown}; list them with .keys")
        return KVBatchMeta(self.partition_id, list(keys), [self.tags[place[key]] for key in keys], self.fields, self.extra_info)


class UnknownKeys(ProtocolError, RuntimeError, KeyError):
    """select_keys was asked for keys that the batch does not hold."""

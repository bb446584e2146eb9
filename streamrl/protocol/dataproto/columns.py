"""The fields of a DataProto and what changes columns: select, pop, rename, union. No row moves here; that is ``rows.py``.

A refused operation leaves the batch as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from streamrl.errors import MissingField, ProtocolError, WrongType
from streamrl.protocol.dataproto.merge import check_same
from streamrl.protocol.tensors import columns as cols
from streamrl.protocol.tensors import rows as moves


@dataclass(eq=False)
class ColumnBatch:
    """Tensors, object columns and metadata of one batch, with one number of rows."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_consistency()

    def check_consistency(self) -> None:
        """ProtocolError unless there is one batch dimension, every name is used once and every array has one entry per row."""
        if not isinstance(self.batch, TensorDictBase | None) or not isinstance(self.non_tensor_batch, dict) or not isinstance(self.meta_info, dict):
            kinds = [type(part).__name__ for part in (self.batch, self.non_tensor_batch, self.meta_info)]
            raise WrongType(f"a DataProto holds a TensorDict or None, a dict of arrays and a dict, got {kinds}; use from_dict")
        if self.batch is not None and len(self.batch.batch_size) != 1:
            raise ProtocolError(f"a DataProto has one batch dimension, got batch_size {tuple(self.batch.batch_size)}; fold the others into the columns")
        self._check_names(set() if self.batch is None else set(map(str, self.batch.keys())), set(self.non_tensor_batch))
        first = "batch" if self.batch is not None else next(iter(self.non_tensor_batch), "")
        for name, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray) or array.ndim == 0:
                raise ProtocolError(f"a non-tensor column is an ndarray with a row axis, got {type(array).__name__} for {name!r}; use from_dict")
            if array.shape[0] != len(self):
                raise ProtocolError(
                    f"columns have one number of rows, got {array.shape[0]} in {name!r} and {len(self)} in {first!r}; drop or repeat rows first"
                )

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((int(array.shape[0]) for array in self.non_tensor_batch.values()), 0)

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """The named columns (None: all) on the same memory; ``deepcopy`` copies arrays and metadata, not tensors."""
        tensors = picked("batch", self._tensors(), batch_keys)
        arrays = picked("non_tensor_batch", self.non_tensor_batch, non_tensor_batch_keys)
        meta = self.meta_info if meta_info_keys is None else picked("meta_info", self.meta_info, meta_info_keys)
        if deepcopy:
            arrays, meta = copy.deepcopy(arrays), copy.deepcopy(meta)
        return type(self)(None if self.batch is None else cols.build(tensors, len(self)), arrays, meta)

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> Self:
        """Remove the named columns (None: none of that kind) and return them; a missing name removes nothing."""
        tensors = picked("batch", self._tensors(), batch_keys or [])
        arrays = picked("non_tensor_batch", self.non_tensor_batch, non_tensor_batch_keys or [])
        meta = picked("meta_info", self.meta_info, meta_info_keys or [])
        taken = type(self)(cols.build(tensors, len(self)) if tensors else None, arrays, meta)
        if self.batch is not None and tensors:
            self.batch = cols.build({name: value for name, value in self._tensors().items() if name not in tensors}, len(self))
        for name in arrays:
            del self.non_tensor_batch[name]
        for name in meta:
            del self.meta_info[name]
        return taken

    def rename(self, old_keys: str | list[str], new_keys: str | list[str]) -> Self:
        """Rename tensor columns in place; names may be swapped."""
        old, new = _names(old_keys), _names(new_keys)
        if len(old) != len(new):
            raise ProtocolError(f"rename takes one new name per old name, got {len(old)} and {len(new)}; pass lists of one length")
        tensors = self._tensors()
        mapping = dict(zip(picked("batch", tensors, old), new, strict=False))
        renamed = [mapping.get(name, name) for name in tensors]
        if len(mapping) != len(new) or len(set(renamed)) != len(renamed):
            raise ProtocolError(f"column names are distinct, got {old} to {new} in a batch with {sorted(tensors)}; choose other names")
        self._check_names(set(renamed), set(self.non_tensor_batch))
        if mapping:
            self.batch = cols.build(dict(zip(renamed, tensors.values(), strict=True)), len(self))
        return self

    def union(self, other: Self) -> Self:
        """Add the columns of ``other`` to the same rows, in place. What both have must be equal; on an error nothing changes."""
        if self._has_rows() and other._has_rows() and len(self) != len(other):
            raise ProtocolError(f"union joins columns of the same rows, got {len(self)} and {len(other)} rows; use concat to add rows")
        self._check_names({*self._tensors(), *other._tensors()}, {*self.non_tensor_batch, *other.non_tensor_batch})
        check_same("non_tensor_batch", self.non_tensor_batch, other.non_tensor_batch)
        check_same("meta_info", self.meta_info, other.meta_info)
        if self.batch is None:
            self.batch = None if other.batch is None else cols.build(other._tensors(), len(other))
        elif other.batch is not None:
            moves.union(self.batch, other.batch)
        self.non_tensor_batch = {**self.non_tensor_batch, **other.non_tensor_batch}
        self.meta_info = {**self.meta_info, **other.meta_info}
        return self

    def to(self, device: str | torch.device) -> Self:
        """Move the tensors; arrays stay."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def _tensors(self) -> dict[str, Any]:
        return {} if self.batch is None else cols.columns_of(self.batch)

    @staticmethod
    def _check_names(tensors: set[str], arrays: set[str]) -> None:
        if both := sorted(tensors & arrays):
            raise ProtocolError(f"a column is in batch or in non_tensor_batch, got both for {both}; rename one of them")

    def _has_rows(self) -> bool:
        return self.batch is not None or bool(self.non_tensor_batch)


def picked(what: str, held: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """The entries ``names`` (None: all) as a new dict; MissingField names those that are not there."""
    missing = [name for name in names or [] if name not in held]
    if missing:
        raise MissingField(f"{what} has the keys {sorted(map(str, held))}, got a request for {missing}; check the names")
    return dict(held) if names is None else {name: held[name] for name in names}


def _names(keys: Any) -> list[str]:
    if isinstance(keys, str):
        return [keys]
    if isinstance(keys, list):
        return keys
    raise WrongType(f"rename takes a name or a list of names, got {type(keys).__name__}; pass a str or a list")

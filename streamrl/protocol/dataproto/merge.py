"""Joining the parts of several DataProtos: object columns, metadata, and the checks before columns are added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streamrl.errors import DtypeClash, ProtocolError, WrongType
from streamrl.protocol.equality import deep_equal


def check_one_key_set(what: str, keys: Sequence[set[str]]) -> None:
    """ProtocolError naming the keys that only some parts have."""
    for i, names in enumerate(keys):
        if names != keys[0]:
            raise ProtocolError(f"{what} keys agree in all parts of a concat, got {sorted(names ^ keys[0])} in only one of part 0 and part {i}; select first")


def concat_arrays(name: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of all arrays; dtype and the shape of a row must agree. Texts may differ in width, which is part of NumPy's dtype."""
    first = arrays[0]
    for i, array in enumerate(arrays):
        if array.dtype != first.dtype and not (array.dtype.kind == first.dtype.kind and array.dtype.kind in "US"):
            raise DtypeClash(f"a column has one dtype in all parts, got {first.dtype} in part 0 and {array.dtype} in part {i} for {name!r}; convert it first")
        if array.shape[1:] != first.shape[1:]:
            raise ProtocolError(
                f"rows of an array have one shape, got {first.shape[1:]} in part 0 and {array.shape[1:]} in part {i} for {name!r}; use object arrays"
            )
    return np.concatenate(arrays)


def merged_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Union of the parts' metadata. ``metrics`` become a dict of lists over the parts; every other key agrees where several parts have it."""
    merged: dict[str, Any] = {}
    metrics: list[Mapping[str, Any]] = []
    for meta in metas:
        for name, value in meta.items():
            if name == "metrics":
                _check_metrics(value)
                metrics += [] if value is None else value if isinstance(value, list) else [value]
            elif name in merged and not deep_equal(merged[name], value):
                raise ProtocolError(f"meta_info agrees in all parts of a concat, got {merged[name]!r} and {value!r} for {name!r}; rename or drop the key")
            else:
                merged.setdefault(name, value)
    if metrics:
        merged["metrics"] = dict_of_lists(metrics)
    return merged


def _check_metrics(value: Any) -> None:
    if not all(isinstance(one, Mapping) for one in (value if isinstance(value, list) else [value] if value is not None else [])):
        raise WrongType(f"metrics of a batch are a dict or a list of dicts, got {value!r:.80}; keep other values under another name")


def dict_of_lists(dicts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The values of each name, in order of the dicts.

    >>> dict_of_lists([{"loss": 1.0}, {"loss": 0.5}])
    {'loss': [1.0, 0.5]}
    """
    lists: dict[str, list[Any]] = {}
    for one in dicts:
        for name, value in one.items():
            lists.setdefault(name, []).append(value)
    return lists


def check_same(what: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    """ProtocolError for the first name that both mappings hold with different values."""
    for name in left.keys() & right.keys():
        if not deep_equal(left[name], right[name]):
            raise ProtocolError(f"a {what} entry in both parts of a union is equal in them, got different values for {name!r}; rename or drop one")

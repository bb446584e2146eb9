"""Prompts that used up their attempts: later epochs skip them.

A prompt is known by its data source and its explicit dataset index; a row without ``extra_info.index`` can't be recognised again and
is never quarantined (otherwise all rows that share the default index would be).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def dataset_name(row: dict[str, Any]) -> str | None:
    """``source/index`` of a row.

    >>> dataset_name({"data_source": "math", "extra_info": {"index": 7}})
    'math/7'
    """
    extra = row.get("extra_info")
    index = extra.get("index") if isinstance(extra, dict) else None
    return None if index is None else f"{row.get('data_source', '')}/{index}"


class Quarantine:
    """A set of dataset names."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def add(self, row: dict[str, Any]) -> None:
        name = dataset_name(row)
        if name is not None:
            self._names[name] = None

    def holds(self, row: dict[str, Any]) -> bool:
        return bool(self._names) and dataset_name(row) in self._names

    def names(self) -> list[str]:
        return list(self._names)

    def restore(self, names: Iterable[str]) -> None:
        self._names = dict.fromkeys(names)

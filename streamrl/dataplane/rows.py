"""What a partition is made of: rows and columns."""

from __future__ import annotations

import functools
from typing import Any

from streamrl.dataplane.columns import unit_bytes
from streamrl.dataplane.journal import Piece
from streamrl.errors import ProtocolError
from streamrl.protocol.fields import ColumnSpec
from streamrl.protocol.keys import TrajectoryKey


class Row:
    """Pieces by field, and the tag. ``attempt`` None: the row belongs to no group."""

    __slots__ = ("attempt", "pieces", "tag", "uid")

    def __init__(self, attempt: int | None, uid: str | None) -> None:
        self.attempt, self.uid = attempt, uid
        self.pieces: dict[str, Piece] = {}
        self.tag: dict[str, Any] = {}


class Column:
    """What the live rows of a partition share: the column's spec, and how many rows have it."""

    __slots__ = ("has_lengths", "num_rows", "spec", "unit")

    def __init__(self, spec: ColumnSpec) -> None:
        self.spec, self.unit, self.num_rows = spec, unit_bytes(spec), 0
        self.has_lengths = spec.kind in ("ragged", "object")

    def piece_bytes(self, length: int) -> int:
        """Bytes of one row."""
        return self.unit * length if self.has_lengths else self.unit

    def sizes(self, lengths: list[int]) -> list[int]:
        """Bytes of each row."""
        unit = self.unit
        return [unit * length for length in lengths] if self.has_lengths else [unit] * len(lengths)

    def total_bytes(self, lengths: list[int]) -> int:
        """Bytes of all rows."""
        return self.unit * (sum(lengths) if self.has_lengths else len(lengths))


@functools.lru_cache(maxsize=1 << 14)
def uid_of(key: str) -> str | None:
    """The group of a trajectory key; None for other keys."""
    try:
        return TrajectoryKey.parse(key).uid
    except ProtocolError:
        return None

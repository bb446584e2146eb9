"""What both inspections share: one line per layer of a row's way, and how a list of findings becomes one.

A line begins with the unit it counts (prompt or trajectory), the container and ``data`` or ``key``; it says OK, or each rule broken with
the row or key that breaks it. Knows neither files nor tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SHOWN_PROBLEMS = 3  # of one layer; the rest is counted


@dataclass(frozen=True)
class Layer:
    """One layer: ``found`` describes what is there, ``broken`` holds "key: rule, got ..." for every breach."""

    unit: Literal["prompt", "trajectory"]
    container: str
    kind: Literal["data", "key"]
    name: str
    found: str
    broken: Sequence[str] = ()


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "row"), counted(2, "row")
    ('1 row', '2 rows')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def spread(values: Sequence[float], digits: int = 0) -> str:
    """``3..8``, or ``3`` when all are equal, or ``none``."""
    if not values:
        return "none"
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low}..{high}"


def shortened(value: object, width: int = 48) -> str:
    """repr of a value, cut to ``width`` characters."""
    text = repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."

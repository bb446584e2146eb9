"""A long series as few points, keeping every peak and every dip: each stretch of time gives its lowest and its highest value, in their order.

``Grid(times, limit)`` is made once for all series of one set of times, so that they keep sharing an axis. Guarantees: at most ``limit`` points; the
overall minimum and maximum stay; a stretch without any value stays a gap. A point may move by the length of its stretch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from streamrl.report.model import Number

MAX_POINTS = 600  # of a line: more than a chart has pixels
DIGITS = 5  # significant ones: an eighth of the size of full floats, and finer than a pixel


class Grid:
    """Stretches of equal numbers of places, two points each; short series stay as they are."""

    def __init__(self, places: Sequence[float], limit: int = MAX_POINTS) -> None:
        self._places = np.asarray(places, dtype=np.float64)
        size = len(self._places)
        self._stretches = limit // 2 if size > limit else 0  # 0: nothing to do
        self._width = -(-size // self._stretches) if self._stretches else 1

    @property
    def axis(self) -> list[float]:
        """The places of the points."""
        if not self._stretches:
            return self._places.tolist()
        firsts = self._places[:: self._width]
        middles = self._places[np.minimum(np.arange(0, len(self._places), self._width) + self._width // 2, len(self._places) - 1)]
        return np.stack([firsts, middles], axis=1).ravel().tolist()

    def extremes(self, values: Sequence[float]) -> list[Number]:
        """The lowest and the highest of each stretch, the earlier one first."""
        if not self._stretches:
            return rounded(values)
        rows = self._rows(values)
        low = np.where(np.isnan(rows), np.inf, rows).argmin(axis=1)
        high = np.where(np.isnan(rows), -np.inf, rows).argmax(axis=1)
        pairs = np.stack([np.minimum(low, high), np.maximum(low, high)], axis=1)
        return rounded(np.take_along_axis(rows, pairs, axis=1).ravel())

    def means(self, values: Sequence[float]) -> list[Number]:
        """The mean of each stretch, twice: for what is drawn as an area."""
        if not self._stretches:
            return rounded(values)
        rows = self._rows(values)
        known = ~np.isnan(rows)
        mean = np.where(known, rows, 0.0).sum(axis=1) / np.where(known.any(axis=1), known.sum(axis=1), np.nan)
        return rounded(np.repeat(mean, 2))

    def _rows(self, values: Sequence[float]) -> NDArray[np.float64]:
        array = np.asarray(values, dtype=np.float64)
        padding = -len(array) % self._width
        return np.concatenate([array, np.full(padding, np.nan)]).reshape(-1, self._width)


def rounded(values: Sequence[float] | NDArray[np.float64]) -> list[Number]:
    """To ``DIGITS`` significant digits; None for what is no number.

    >>> rounded([0.123456789, 3.0, float("nan"), float("inf")])
    [0.12346, 3, None, None]
    """
    return [_short(value) if np.isfinite(value) else None for value in np.asarray(values, dtype=np.float64).tolist()]


def _short(value: float) -> float:
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short

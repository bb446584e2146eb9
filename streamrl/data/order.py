"""The order of an epoch: a function of (seed, epoch, sizes, weights) and nothing else, so that a resumed run needs no generator state.

Without weights an epoch is a permutation of all rows. With weights it has as many places, shared out among the files; a file's rows are
taken from an endless stream of its own, whose every pass holds each row once, so an epoch may see a part of a large file and a small one
several times. Rows are numbered over all files, in the files' order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

# Last element of a seed, so that the draws of one purpose are never those of another. (Numpy takes [7, 1] and [7, 1, 0] for the same seed.)
_PASS, _INTERLEAVING = 1, 2


def prompt_order(sizes: Sequence[int], weights: Sequence[float] | None, *, shuffle: bool, seed: int, epoch: int) -> list[int]:
    """Row numbers as epoch ``epoch`` visits them: ``sum(sizes)`` of them."""
    if weights is None:
        return epoch_order(sum(sizes), shuffle=shuffle, seed=seed, epoch=epoch)
    counts = shares(sum(sizes), weights)
    firsts = [sum(sizes[:source]) for source in range(len(sizes))]
    drawn = [_stretch(size, source, epoch * count, count, shuffle=shuffle, seed=seed) for source, (size, count) in enumerate(zip(sizes, counts, strict=True))]
    sources = _interleaving(counts, shuffle=shuffle, seed=seed, epoch=epoch)
    order = np.empty(len(sources), dtype=np.int64)
    for source, rows in enumerate(drawn):
        order[sources == source] = rows + firsts[source]
    return order.tolist()


def epoch_order(size: int, *, shuffle: bool, seed: int, epoch: int) -> list[int]:
    """Row numbers 0..size-1 as epoch ``epoch`` visits them; another permutation in every epoch."""
    if not shuffle:
        return list(range(size))
    return _generator(seed, epoch).permutation(size).tolist()


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """``total`` places in proportion to ``weights``, exactly; what rounding leaves goes to the largest remainders, the earlier on a tie.

    >>> shares(10, [1, 1, 1])
    [4, 3, 3]
    """
    exact = [Fraction(weight) for weight in weights]
    quotas = [total * weight / sum(exact) for weight in exact]
    counts = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda source: (counts[source] - quotas[source], source))
    for source in by_remainder[: total - sum(counts)]:
        counts[source] += 1
    return counts


def _stretch(size: int, source: int, start: int, count: int, *, shuffle: bool, seed: int) -> np.ndarray:
    """Places ``start`` to ``start + count`` of the source's endless stream of passes."""
    if not count:
        return np.empty(0, dtype=np.int64)
    passes = range(start // size, (start + count - 1) // size + 1)
    rows = np.concatenate([_generator(seed, source, number, _PASS).permutation(size) if shuffle else np.arange(size) for number in passes])
    return rows[start - passes[0] * size :][:count]


def _interleaving(counts: Sequence[int], *, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
    """Which source each place takes: a seeded shuffle, or each source evenly spread, item j of c at (j + 1/2) / c of the epoch."""
    sources = np.repeat(np.arange(len(counts)), counts)
    if shuffle:
        return _generator(seed, epoch, _INTERLEAVING).permutation(sources)
    times = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
    return sources[np.lexsort((sources, times))]


def _generator(*seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))

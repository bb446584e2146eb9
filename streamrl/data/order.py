"""The order of an epoch: a function of (seed, epoch, size) and nothing else, so that a resumed run needs no generator state."""

from __future__ import annotations

import numpy as np


def epoch_order(size: int, *, shuffle: bool, seed: int, epoch: int) -> list[int]:
    """Row numbers 0..size-1 as epoch ``epoch`` visits them; another permutation in every epoch."""
    if not shuffle:
        return list(range(size))
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch]))).permutation(size).tolist()

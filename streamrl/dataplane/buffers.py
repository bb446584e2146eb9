"""Memory that gets are copied into, used again once nobody holds what was read.

A page that is touched for the first time costs several times its copy. So blocks are kept and given out again when the last array or tensor over
them is gone: every view of a block refers to it, which its reference count shows. At most ``KEPT_BYTES`` are kept, in use or not; what goes beyond
is ordinary memory. Small reads are not worth it.
"""

from __future__ import annotations

import sys
import threading

import numpy as np

KEPT_BYTES = 256 << 20
SMALL_BYTES = 128 << 10
_FREE = 3  # references to a block that nobody uses: the list, the local name and the argument of getrefcount


class Buffers:
    """Blocks of one client."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._blocks: list[np.ndarray] = []  # the one used longest ago first
        self._guard = threading.Lock()  # copies run in several threads

    def take(self, num_bytes: int) -> np.ndarray:
        """Uninitialised bytes that nobody else has."""
        if num_bytes < SMALL_BYTES or num_bytes > self._kept_bytes:
            return np.empty(num_bytes, np.uint8)
        with self._guard:
            block = self._free_block(num_bytes)
            if block is None:
                block = np.empty(num_bytes + num_bytes // 4, np.uint8)  # the next batch is a little larger
                self._make_room(block.nbytes)
            self._blocks.append(block)
            return block[:num_bytes]

    def _free_block(self, num_bytes: int) -> np.ndarray | None:
        for place in range(len(self._blocks)):
            block = self._blocks[place]
            if num_bytes <= block.nbytes <= 2 * num_bytes and sys.getrefcount(block) == _FREE:
                return self._blocks.pop(place)
        return None

    def _make_room(self, num_bytes: int) -> None:
        """Let go of the oldest blocks; those in use belong to their users from then on."""
        total = num_bytes + sum(block.nbytes for block in self._blocks)
        while self._blocks and total > self._kept_bytes:
            total -= self._blocks.pop(0).nbytes

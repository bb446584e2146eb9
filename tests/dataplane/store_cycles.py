"""Memory comes back: put, get and clear, again and again; ``python -m tests.dataplane.store_cycles`` runs 100,000 cycles.

Every second cycle's row lives on for five more cycles, some rows are larger than a segment, and each tenth is read from a second client. After all
rows are cleared the allocated bytes are back at the baseline within a second, and neither index nor clients hold more than at the start.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from streamrl.dataplane import Store
from streamrl.protocol.segments import StoreUse
from tests.dataplane.store_world import config, one_store


class Cycles(NamedTuple):
    """What was in use after the warm-up and after the last row was cleared, and how long it took to get back."""

    baseline: StoreUse
    after: StoreUse
    returned_s: float
    index_entries: int
    files: int
    mapped: int
    grown_bytes: int


def run_cycles(folder: Path, count: int) -> Cycles:
    """``count`` cycles in a store of 1 MiB."""
    return asyncio.run(_cycles(folder, count))


def check_no_leak(seen: Cycles) -> None:
    """AssertionError names what was left."""
    assert seen.after.bytes_allocated == seen.baseline.bytes_allocated and seen.returned_s < 1
    assert seen.after.bytes_live == 0 and seen.after.partitions == {} and seen.index_entries == 0
    assert seen.after.bytes_spare <= seen.after.capacity_bytes // 4 and seen.files <= 6 and seen.mapped <= 8
    assert seen.grown_bytes < 32 << 20


async def _cycles(folder: Path, count: int) -> Cycles:
    with one_store(folder) as (store, index):
        reader = Store(index, writer="r", folder=index.path, config=config())
        for i in range(-100, count + 5):
            if i == 0:
                baseline, began_bytes = await index.use(), psutil.Process().memory_info().rss
            if i < count:
                size = 100_000 if i % 50 == 0 else 16
                await store.async_kv_batch_put([f"u{i + 100}_0_0"], "p", {"x": [np.full(size, i % 100, np.uint8)], "o": [{"i": i}]}, [{"attempt": 1}])
            if i % 10 == 0 and i < count:
                back = await reader.async_get_numpy([f"u{i + 100}_0_0"], "p")
                assert back["o"] == [{"i": i}] and back["x"][0].size == size and (back["x"][0] == i % 100).all()
            gone = i if i % 2 else i - 4
            await store.async_kv_clear([f"u{gone + 100}_0_0"], "p")
        ended = time.monotonic()
        while (after := await index.use()).bytes_allocated != baseline.bytes_allocated and time.monotonic() - ended < 1:
            await asyncio.sleep(0.01)
        returned_s = time.monotonic() - ended
        assert reader._reader is not None
        reader._reader.mappings.release_unlinked()
        partition = index._partitions["p"]
        entries = len(partition.rows) + len(partition.groups) + len(partition._columns)
        files, mapped = len(list(index.path.iterdir())), len(reader._reader.mappings)
        return Cycles(baseline, after, returned_s, entries, files, mapped, psutil.Process().memory_info().rss - began_bytes)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        began = time.monotonic()
        seen = run_cycles(Path(folder), count)
    print(f"{count} cycles in {time.monotonic() - began:.0f} s: {seen}")
    check_no_leak(seen)


if __name__ == "__main__":
    main()

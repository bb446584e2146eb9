"""Rows on disk: they read as before, take no shared memory, and their files go with them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from streamrl.dataplane import Store, StoreIndex
from streamrl.errors import MissingKey, StoreFull
from tests.dataplane.store_world import config, one_store
from tests.dataplane.test_recovery import life

KB = 1024
PLENTY = {"put_timeout_s": 30}


def rows(*numbers: int, kilobytes: int = 10) -> tuple[list[str], str, dict, list[dict]]:
    """Arguments of a put: keys, partition, two columns and tags of a group a row."""
    keys = [f"u{n}_0_0" for n in numbers]
    columns = {"x": [np.full(kilobytes * KB, n % 200, np.uint8) for n in numbers], "o": [{"n": n} for n in numbers]}
    return keys, "train", columns, [{"attempt": 1, "seq_no": n} for n in numbers]


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def check(store: Store, *numbers: int) -> None:
    got = await store.async_get_numpy([f"u{n}_0_0" for n in numbers], "train")
    assert got["o"] == [{"n": n} for n in numbers] and all((x == n % 200).all() for x, n in zip(got["x"], numbers, strict=True))


def test_spilled_rows_read_as_before_from_one_run_a_column_and_leave_shared_memory(tmp_path):
    async def main():
        with one_store(tmp_path, spill_dir=str(tmp_path / "disk"), **PLENTY) as (store, index):
            for n in range(10):
                await store.async_kv_batch_put(*rows(n))
            await store.aclose()  # sealed
            moved = await index.spill("train", ["u9_0_0", "unknown"], [f"u{n}" for n in range(9)])
            use = await index.use()
            assert moved == use.bytes_live > 100 * KB and use.bytes_allocated == 0 and use.bytes_spilled >= moved
            assert await store.spill(["u0", "u1"]) == 0  # there already
            await check(store, *range(9, -1, -1))
            located = await index.locate("train", [f"u{n}_0_0" for n in range(6)], ["x", "o"], False)
            assert [len(column.runs) for column in located.columns] == [1, 1]
            await store.async_kv_batch_put(["u3_0_0"], "train", {"back": [np.ones(3)]})  # a write-back lies in memory again
            assert (await store.async_get_numpy(["u3_0_0"], "train", ["back", "o"]))["o"] == [{"n": 3}]
            for n in range(10):
                assert files(tmp_path / "disk")
                await store.clear([f"u{n}"])
            assert files(tmp_path / "disk") == [] and (await index.use()).bytes_spilled == 0
        assert not any((tmp_path / "disk").iterdir())

    asyncio.run(main())


def test_with_spill_a_store_takes_more_than_its_capacity_and_the_oldest_rows_go_first(tmp_path):
    async def main():
        with one_store(tmp_path, spill=True, spill_dir=str(tmp_path / "disk"), **PLENTY) as (store, index):
            for n in range(300):
                await store.async_kv_batch_put(*rows(n))
            use = await index.use()
            assert use.bytes_allocated <= use.capacity_bytes < use.bytes_live and len(files(tmp_path / "disk")) < 100
            on_disk = [n for n in range(300) if index._pool.segments[index._partitions["train"].rows[f"u{n}_0_0"].pieces["x"][0]].ref.folder]
            assert on_disk == list(range(len(on_disk)))
            await check(store, *range(300))
            writers = [Store(index, writer=f"w{i}", folder=None, config=config(**PLENTY)) for i in range(4)]
            await asyncio.gather(*(writer.async_kv_batch_put(*rows(300 + i, kilobytes=200)) for i, writer in enumerate(writers)))
            await check(store, *range(304))

    asyncio.run(main())


@pytest.mark.parametrize("spill", [False, True])
def test_a_disk_that_takes_nothing_leaves_the_rows_in_memory(tmp_path, spill):
    (tmp_path / "file").write_bytes(b"")

    async def main():
        with one_store(tmp_path, spill=spill, spill_dir=str(tmp_path / "file")) as (store, index):
            await store.async_kv_batch_put(*rows(1, kilobytes=900))
            with pytest.raises(StoreFull, match=r"moved to a disk with room.*Not a directory.*spill_dir"):
                await index.spill("train", [], ["u1"])
            await check(store, 1)
            with pytest.raises(StoreFull, match="capacity is used up"):
                await store.async_kv_batch_put(*rows(2, kilobytes=900))

    asyncio.run(main())


def test_rows_cleared_or_rewritten_while_they_are_copied_stay_as_they_are(tmp_path):
    async def main():
        with one_store(tmp_path, spill_dir=str(tmp_path / "disk"), **PLENTY) as (store, index):
            for turn in range(20):
                await store.async_kv_batch_put(*rows(3 * turn, 3 * turn + 1, 3 * turn + 2))
                spilling = asyncio.create_task(index.spill("train", [], [f"u{3 * turn + i}" for i in range(3)]))
                await asyncio.sleep(0)
                await store.clear([f"u{3 * turn}"])
                await store.async_kv_batch_put([f"u{3 * turn + 1}_0_0"], "train", {"o": [{"n": "new"}]})
                await spilling
                with pytest.raises(MissingKey):
                    await store.async_get_numpy([f"u{3 * turn}_0_0"], "train")
                assert (await store.async_get_numpy([f"u{3 * turn + 1}_0_0"], "train"))["o"] == [{"n": "new"}]
                await check(store, 3 * turn + 2)
                await store.clear([f"u{3 * turn + 1}", f"u{3 * turn + 2}"])
            assert files(tmp_path / "disk") == [] and (await index.use()).bytes_live == 0

    asyncio.run(main())


def test_segments_that_go_during_a_long_spill_are_left_out(tmp_path):
    async def main():
        with one_store(tmp_path, spill_dir=str(tmp_path / "disk"), **PLENTY) as (store, index):
            for n in range(10):  # a segment each; two to a file
                await store.async_kv_batch_put(*rows(n, kilobytes=60))
            await store.aclose()
            spilling = asyncio.create_task(index.spill("train", [], [f"u{n}" for n in range(10)]))
            while not files(tmp_path / "disk"):
                await asyncio.sleep(0)
            await store.clear([f"u{n}" for n in range(5, 10)])
            assert 5 * 60 * KB <= await spilling < 7 * 60 * KB
            await check(store, *range(5))
            assert (await index.use()).bytes_allocated == 0 and (await index.use()).bytes_live < 5 * 61 * KB
            assert len(files(tmp_path / "disk")) == 3

    asyncio.run(main())


def test_a_reader_whose_row_was_moved_between_look_up_and_copy_finds_it_again(tmp_path):
    class MovedMeanwhile:
        """Moves the row after its place was told, and has its segment lent and written again."""

        def __init__(self, index: StoreIndex, other: Store) -> None:
            self._index, self._other, self.told = index, other, 0

        def __getattr__(self, name: str):
            return getattr(self._index, name)

        async def locate(self, *arguments):
            located = await self._index.locate(*arguments)
            self.told += 1
            if self.told == 1:
                await self._other.aclose()
                await self._index.spill("train", [], ["u1"])
                await self._other.async_kv_batch_put(*rows(7))
            return located

    async def main():
        with one_store(tmp_path, spill_dir=str(tmp_path / "disk"), **PLENTY) as (store, index):
            await store.async_kv_batch_put(*rows(1))
            way = MovedMeanwhile(index, store)
            reader = Store(way, writer="r", folder=index.path, config=config(**PLENTY))
            await check(reader, 1)
            assert way.told == 2

    asyncio.run(main())


def test_rows_on_disk_outlive_the_machines_memory(tmp_path):
    async def main():
        with life(tmp_path) as index:
            store = Store(index, writer="w", folder=None, config=config(**PLENTY))
            await store.async_kv_batch_put(*rows(1))
            await store.async_kv_batch_put(*rows(2))
            await index.spill("train", [], ["u1"])
            half_done = next((tmp_path / "spill").iterdir()) / ("0" * 32)
            half_done.write_bytes(b"half")
            for path in index.path.iterdir():
                path.unlink()
        with life(tmp_path) as index:
            assert index.lost_keys == {"train": ["u2_0_0"]} and not half_done.exists()
            await check(Store(index, writer="r", folder=None, config=config(**PLENTY)), 1)
            index.close()
        assert files(tmp_path / "spill") == []

    asyncio.run(main())

"""Rows of trained groups wait for their checkpoint on disk: they read as before, cost no shared memory, and a disk that takes none costs no run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from streamrl.config.rollout import ReplayConfig
from streamrl.dataplane import Store, StoreIndex
from streamrl.errors import MissingKey, StoreFull
from streamrl.protocol.topic import Topic
from streamrl.replay import ReplayBuffer, ReplayService
from streamrl.replay.keeping import Keeper
from tests.dataplane.store_world import one_store
from tests.replay.replay_world import check_world, good, prompts

KB = 1024


@contextmanager
def run_of(folder: Path, spill_dir: Path, **replay) -> Iterator[tuple[ReplayService, Store, StoreIndex]]:
    with one_store(folder, spill_dir=str(spill_dir), put_timeout_s=30) as (store, index):
        config = ReplayConfig(max_staleness=3, retain="checkpoint", **{"retain_bytes": 1 << 20} | replay)
        buffer = ReplayBuffer(config, groups_per_step=2, n=2)
        yield ReplayService(buffer, clear=store.clear, spill=store.spill), store, index


async def train_two(service: ReplayService, store: Store, first: int, version: int, publishes: bool = True) -> list[str]:
    """Two groups from prompt to trained; their keys."""
    await service.admit(prompts(2, first))
    for lease in (await service.lease("w", 2, 1)).leases:
        for session in range(2):
            push = good(lease, session, version)
            column = {"x": [np.full(10 * KB, lease.seq_no, np.uint8)]}
            await store.async_kv_batch_put(push.keys, "train", column, [tag | {"attempt": lease.attempt, "seq_no": lease.seq_no} for tag in push.tags])
            await service.push(push)
    await store.aclose()  # sealed
    batch = await service.take(2, 1)
    await service.commit(batch.lease_id, [], publishes)
    return batch.meta.keys


async def until(condition) -> None:
    async with asyncio.timeout(2):
        while not await condition():
            await asyncio.sleep(0.005)


def test_rows_of_trained_groups_leave_shared_memory_at_their_publication_and_a_rollback_reads_them_from_disk(tmp_path):
    async def main():
        with run_of(tmp_path, tmp_path / "disk") as (service, store, index):
            keys = await train_two(service, store, 0, 0)
            assert (await index.use()).bytes_spilled == 0  # the update is not served yet
            await service.published(1)

            async def moved() -> bool:
                use = await index.use()
                return use.bytes_allocated == 0 and use.bytes_spilled > 40 * KB

            await until(moved)
            assert await service.rollback(None, 2) == 2
            await service.published(2)
            batch = await service.take(2, 1)
            assert batch.meta.keys == keys
            rows = await store.async_get_numpy(keys, "train")
            assert [int(x[0]) for x in rows["x"]] == [0, 0, 1, 1]
            await service.commit(batch.lease_id, [])
            await service.published(3)
            mark = (await service.snapshot()).mark
            await service.checkpointed(mark)

            async def gone() -> bool:
                return (await index.use()).bytes_spilled == 0 and not (await index.use()).partitions

            await until(gone)
            check_world(service.buffer)
            await service.close()

    asyncio.run(main())


def test_on_disk_too_the_oldest_give_way_beyond_the_budget(tmp_path):
    async def main():
        with run_of(tmp_path, tmp_path / "disk", retain_bytes=2 * 2 * 7 * 96) as (service, store, index):  # two groups by their tokens
            await train_two(service, store, 0, 0)
            await service.published(1)
            kept = await train_two(service, store, 2, 1)
            await service.published(2)

            async def only_the_newest() -> bool:
                return sorted((await index.tags("train")).get("train", {})) == kept and (await index.use()).bytes_allocated == 0

            await until(only_the_newest)
            await service.close()

    asyncio.run(main())


def test_a_disk_that_takes_nothing_costs_the_rows_and_one_warning_and_not_the_run(tmp_path, caplog):
    (tmp_path / "file").write_bytes(b"")

    async def main():
        with run_of(tmp_path, tmp_path / "file") as (service, store, index):
            for step in range(3):
                keys = await train_two(service, store, 2 * step, step)
                await service.published(step + 1)

                async def freed() -> bool:
                    return (await index.use()).bytes_live == 0

                await until(freed)
                with pytest.raises(MissingKey):
                    await store.async_get_numpy(keys, "train")
            assert await service.rollback(None, 4) == 6 and (await service.stats()).pending == 6  # generated again
            check_world(service.buffer)
            await service.close()

    with caplog.at_level(logging.WARNING, "streamrl.replay.keeping"):
        asyncio.run(main())
    assert [r.message for r in caplog.records if "kept on disk" in r.message and "Not a directory" in r.message] == [r.message for r in caplog.records]
    assert len(caplog.records) == 1


def test_nobody_waits_for_the_move_and_groups_that_came_back_meanwhile_are_not_given_up():
    async def main():
        gate, spilled = asyncio.Event(), []

        async def spill(uids: list[str]) -> int:
            spilled.append(uids)
            await gate.wait()
            raise StoreFull("no room")

        service = ReplayService(ReplayBuffer(ReplayConfig(max_staleness=3, retain="checkpoint", retain_bytes=1 << 20), groups_per_step=1, n=1), spill=spill)
        for version in range(3):
            await service.admit(prompts(1, version))
            (lease,) = (await service.lease("w", 1, 1)).leases
            await service.push(good(lease, 0, version))
            batch = await service.take(1, 1)
            await service.commit(batch.lease_id, [])
            await asyncio.wait_for(service.published(version + 1), 0.2)
            await asyncio.sleep(0)
        assert spilled == [["g0"]]  # the others wait behind it
        await service.checkpointed(1)
        assert await service.rollback(1, 4) == 2
        gate.set()
        await service.close()
        assert spilled == [["g0"]] and service.buffer.stats().dropped == {"shutdown": 2}

    asyncio.run(main())


def test_a_move_that_hangs_is_given_up_at_its_deadline(monkeypatch):
    monkeypatch.setattr("streamrl.replay.keeping.SPILL_TIMEOUT_S", 0.01)

    async def main():
        given_up = Topic()
        seen: list[list[str]] = []

        async def spill(uids: list[str]) -> int:
            await asyncio.Event().wait()
            return 0

        def give_up(uids: list[str]) -> None:
            seen.append(uids)
            given_up.wake()

        keeper = Keeper(spill, lambda uids: uids, give_up)
        keeper.keep(["a"])
        await given_up.wait_until(asyncio.get_running_loop().time() + 2)
        assert seen == [["a"]]

    asyncio.run(main())


def test_a_new_process_moves_what_its_predecessor_did_not():
    async def main():
        spilled: list[str] = []

        async def spill(uids: list[str]) -> int:
            spilled.extend(uids)
            return 0

        buffer = ReplayBuffer(ReplayConfig(max_staleness=3, retain="checkpoint", retain_bytes=1 << 20), groups_per_step=1, n=1)
        for version in range(2):
            buffer.admit(prompts(1, version))
            (lease,) = buffer.lease("w", 1).leases
            buffer.push(good(lease, 0, version))
            buffer.commit(buffer.take(1).lease_id)
            if version == 0:
                buffer.published(1)
        service = ReplayService(buffer, spill=spill)
        timers = asyncio.create_task(service.run_timers())
        await asyncio.sleep(0.01)
        assert spilled == ["g0"]  # g1 is not published
        await service.close()
        await timers

    asyncio.run(main())

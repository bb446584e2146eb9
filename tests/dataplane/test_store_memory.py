"""Segments: recycled, sealed, bounded, swept; and the store as the loops and other processes use it."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from streamrl.dataplane import IndexCalls, Store, StoreIndex, sweep
from streamrl.dataplane.columns import encode_columns
from streamrl.dataplane.segments import SegmentReader, stamp_generation
from streamrl.errors import ConfigError, MissingKey, ProtocolError, StaleWrite, StoreFull
from streamrl.protocol.fields import trajectory_tag
from streamrl.protocol.interfaces import TrajectoryStore
from streamrl.protocol.rpc import Service, connect
from streamrl.protocol.segments import ColumnPut, PutRequest, SegmentRef
from tests.dataplane.store_cycles import check_no_leak, run_cycles
from tests.dataplane.store_world import config, one_store, trajectory

KB = 1024


def block(kilobytes: int, fill: int = 1) -> dict:
    return {"x": [np.full(kilobytes * KB, fill, np.uint8)]}


def use(index):
    return asyncio.run(index.use())


def test_allocated_bytes_return_to_the_baseline_and_segments_are_recycled(tmp_path):
    with one_store(tmp_path) as (store, index):
        store.kv_put("warm", "p", {"x": 1})
        store.kv_clear(["warm"], "p")
        baseline, files = use(index).bytes_allocated, set()
        for turn in range(40):
            keys = [f"k{turn}-{i}" for i in range(8)]
            for key in keys:
                store.kv_batch_put([key], "p", block(30, turn))
            assert store.get_numpy(keys[:1], "p")["x"][0][0] == turn
            assert store.kv_clear(keys, "p") == 8
            files |= set(os.listdir(index.path))
        after = use(index)
        assert after.bytes_allocated == baseline and after.bytes_live == 0 and after.partitions == {}
        assert after.bytes_spare <= 4 * 64 * KB
        assert len(os.listdir(index.path)) <= 6 and len(files) < 12  # far fewer files than puts


def test_overwritten_pieces_are_freed(tmp_path):
    with one_store(tmp_path) as (store, index):
        for turn in range(200):
            store.kv_batch_put(["k"], "p", block(20, turn % 7))
        assert use(index).bytes_live == 20 * KB and use(index).bytes_allocated <= 3 * 64 * KB
        assert store.get_numpy(["k"], "p")["x"][0][5] == 199 % 7


def test_a_put_larger_than_a_segment_gets_a_file_of_its_own_that_is_unlinked_when_cleared(tmp_path):
    with one_store(tmp_path) as (store, index):
        store.kv_batch_put(["big"], "p", block(300, 3))
        assert (store.get_numpy(["big"], "p")["x"][0] == 3).all()
        assert use(index).bytes_allocated >= 300 * KB
        store.kv_clear(["big"], "p")
        assert use(index).bytes_allocated == 0 and len(os.listdir(index.path)) == 1  # the owner file


def test_a_full_store_raises_with_numbers_after_its_deadline_and_changes_nothing(tmp_path):
    with one_store(tmp_path) as (store, index):
        for i in range(3):
            store.kv_batch_put([f"k{i}"], "p", block(300))
        began = time.monotonic()
        with pytest.raises(StoreFull, match=r"capacity 1048576.*allocated .*live 921600"):
            store.kv_batch_put(["more"], "p", block(300), [{"t": 1}])
        assert 0.15 < time.monotonic() - began < 2
        assert set(store.kv_list("p")["p"]) == {"k0", "k1", "k2"} and use(index).rejected_writes == 0
        with pytest.raises(StoreFull, match="larger than the capacity"):
            store.kv_batch_put(["huge"], "p", block(2000))


def test_a_waiting_put_goes_on_as_soon_as_room_is_cleared(tmp_path):
    async def main():
        with one_store(tmp_path, put_timeout_s=5) as (store, _):
            for i in range(3):
                await store.async_kv_batch_put([f"k{i}"], "p", block(300))
            waiting = asyncio.create_task(store.async_kv_batch_put(["more"], "p", block(300, 8)))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            began = time.monotonic()
            await store.async_kv_clear(["k1"], "p")  # not held up by the waiting put
            await waiting
            assert time.monotonic() - began < 0.5
            assert (await store.async_get_numpy(["more"], "p"))["x"][0][0] == 8

    asyncio.run(main())


def test_several_waiting_writers_are_all_served(tmp_path):
    async def main():
        with one_store(tmp_path, put_timeout_s=5) as (store, index):
            await store.async_kv_batch_put(["first"], "p", block(900))
            others = [Store(index, writer=f"o{i}", folder=None, config=config(put_timeout_s=5)) for i in range(4)]
            puts = [asyncio.create_task(other.async_kv_batch_put([f"k{i}"], "p", block(50 + 40 * i))) for i, other in enumerate(others)]
            await asyncio.sleep(0.05)
            await store.async_kv_clear(["first"], "p")
            await asyncio.gather(*puts)

    asyncio.run(main())


def test_a_dead_writers_rows_stay_readable_and_its_segments_are_never_lent_again(tmp_path):
    async def main():
        with one_store(tmp_path) as (reader, index):
            dead = Store(index, writer="rollout-3", folder=index.path, config=config())
            await dead.async_kv_batch_put(["a"], "p", block(5, 4))
            assert await index.writer_gone("rollout-3") == 1
            assert await index.writer_gone("rollout-3") == 0
            assert (await reader.async_get_numpy(["a"], "p"))["x"][0][0] == 4
            with pytest.raises(ProtocolError, match="sealed"):  # it was only silent: its segment is taken away
                await dead.async_kv_batch_put(["b"], "p", block(5))
            await dead.async_kv_batch_put(["b"], "p", block(5, 6))  # under a new segment it may go on
            assert (await reader.async_get_numpy(["b"], "p"))["x"][0][0] == 6
            await reader.async_kv_clear(["a", "b"], "p")
            assert (await index.use()).bytes_spare == 0

    asyncio.run(main())


def test_a_reader_of_a_recycled_segment_gets_missing_key_and_never_foreign_bytes(tmp_path):
    async def main():
        with one_store(tmp_path) as (store, index):
            await store.async_kv_batch_put(["old"], "p", block(40, 1))
            located = await index.locate("p", ["old"], None, False)
            reader = SegmentReader(index.path)
            runs = [column.runs for column in located.columns]
            assert reader.copy(runs, located.segments)[0][0] == 1
            await store.async_kv_clear(["old"], "p")
            for i in range(3):
                await store.async_kv_batch_put([f"new{i}"], "p", block(40, 2))
            with pytest.raises(MissingKey, match=r"generation|removed"):
                reader.copy(runs, located.segments)

    asyncio.run(main())


def test_readers_beside_a_busy_recycler_see_their_rows_or_a_missing_key(tmp_path):
    with one_store(tmp_path, put_timeout_s=5) as (store, index):
        reader, stop, seen = Store(index, writer="r", folder=index.path, config=config()), threading.Event(), []

        def read():
            while not stop.is_set():
                for key in range(4):
                    try:
                        values = reader.get_numpy([f"k{key}"], "p")["x"][0]
                    except MissingKey:
                        continue
                    seen.append(bool((values == values[0]).all() and values[0] % 4 == key))

        thread = threading.Thread(target=read)
        thread.start()
        for turn in range(150):
            key = turn % 4
            store.kv_batch_put([f"k{key}"], "p", block(25, key + 4 * (turn % 50)))
            if turn % 3 == 0:
                store.kv_clear([f"k{(turn + 2) % 4}"], "p")
        stop.set()
        thread.join()
        assert seen and all(seen)


def test_files_are_private_and_unguessable_and_the_folder_goes_with_the_index(tmp_path):
    index = StoreIndex(tmp_path, "run7", config(), os.getpid())
    store = Store(index, writer="w", folder=index.path, config=config())
    store.kv_put("k", "p", {"x": 1})
    assert index.path.name.startswith("streamrl-run7-") and stat.S_IMODE(index.path.stat().st_mode) == 0o700
    (segment,) = [path for path in index.path.iterdir() if path.name != "owner.json"]
    assert stat.S_IMODE(segment.stat().st_mode) == 0o600 and len(segment.name) == 32
    index.close()
    assert not index.path.exists()
    index.close()


def test_a_capacity_that_does_not_fit_the_device_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"\$\.dataplane\.capacity_bytes.*lower it"):
        StoreIndex(tmp_path, "x", config(capacity_bytes=1 << 60), os.getpid())
    with pytest.raises(ConfigError, match=r"\$\.dataplane\.shm_dir"):
        StoreIndex(tmp_path / "none", "x", config(), os.getpid())
    assert list(tmp_path.iterdir()) == []


def test_sweep_removes_dead_runs_only(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    dead, alive = StoreIndex(tmp_path, "dead", config(), child.pid), StoreIndex(tmp_path, "alive", config(), os.getpid())
    (tmp_path / "streamrl-newborn-00").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "streamrl-link-00").symlink_to(tmp_path / "other")
    assert sweep(tmp_path) == []
    child.communicate(b"\n")
    assert sweep(tmp_path) == [dead.path]
    recycled = StoreIndex(tmp_path, "recycled", config(), os.getpid())
    (recycled.path / "owner.json").write_text(f'{{"pid":{os.getpid()},"started":1}}')  # the pid lives, but as another process
    assert sweep(tmp_path) == [recycled.path]
    assert alive.path.exists() and (tmp_path / "other").exists() and (tmp_path / "streamrl-newborn-00").exists()


def test_the_verbs_work_over_the_wire(tmp_path):
    async def main():
        with one_store(tmp_path) as (_, index):
            remote: IndexCalls = connect(IndexCalls, Service(IndexCalls, index).handle)
            store = Store(remote, writer="far", folder=None, config=config())
            await store.async_kv_batch_put(["a", "b"], "p", {"x": [np.arange(3), np.arange(0)], "o": ["t", None]}, [{"t": b"raw"}, {"t": None}])
            assert await store.async_kv_list() == {"p": {"a": {"t": b"raw"}, "b": {"t": None}}}
            batch = await store.async_kv_batch_get(["b", "a"], "p")
            assert [row.tolist() for row in batch["x"].unbind()] == [[], [0, 1, 2]] and batch["o"] == [None, "t"]
            with pytest.raises(MissingKey, match="ghost"):
                await store.async_kv_batch_get(["ghost"], "p")
            with pytest.raises(StoreFull, match="capacity"):
                await store.async_kv_batch_put(["big"], "p", block(2000))
            assert await store.async_kv_clear(["a", "b"], "p") == 2
            assert (await remote.use()).bytes_live == 0 and await remote.writer_gone("far") == 1

    asyncio.run(main())


def test_a_put_of_bytes_that_were_not_lent_is_refused(tmp_path):
    async def main():
        with one_store(tmp_path) as (store, index):
            await store.async_kv_put("k", "p", {"x": 1})
            (column,) = encode_columns({"y": np.arange(4)}, 4)
            keys = ["a", "b", "c", "d"]
            for segment, base in ((None, 64), (99, 64), (1, 0), (1, 64 * KB - 8)):
                put = PutRequest(store.writer, "p", keys, [ColumnPut("y", column.spec, base, column.lengths)], segment)
                with pytest.raises(ProtocolError):
                    await index.put(put)
            with pytest.raises(ProtocolError):
                await index.put(PutRequest("thief", "p", keys, [ColumnPut("y", column.spec, 64, column.lengths)], 1))
            assert list((await index.tags("p"))["p"]) == ["k"]

    asyncio.run(main())


def test_trajectories_go_in_and_come_out_with_their_objects(tmp_path):
    async def main():
        with one_store(tmp_path) as (store, _):
            loops_view: TrajectoryStore = store
            rows = [trajectory(session_id=0, tokens=3), trajectory(session_id=1, tokens=1, row={"data_source": "gsm"})]
            await loops_view.put_trajectories(rows, [trajectory_tag(row, 1, 0, 5) for row in rows])
            keys = ["a_0_0", "a_1_0"]
            batch = await store.async_kv_batch_get(keys, "train")
            assert batch["responses"].is_nested and [r.tolist() for r in batch["input_ids"].unbind()] == [[5, 6, 0, 1, 2], [5, 6, 0]]
            assert [r.tolist() for r in batch["rm_scores"].unbind()] == [[0, 0, 1], [1]] and batch["num_turns"].tolist() == [2, 2]
            assert batch["data_source"] == ["math", "gsm"] and batch["reward_extra_info"] == [{"acc": 1, "detail": None}] * 2
            assert batch.get("raw_prompt").tolist() == [[{"role": "user", "content": "1+1"}], None] and batch["extra_info"] == [None, None]
            assert (await store.async_kv_list("train"))["train"]["a_0_0"]["response_len"] == 3
            assert await loops_view.clear(keys) == 2

    asyncio.run(main())


def test_clearing_a_group_by_its_uid_frees_rows_nobody_reported_and_refuses_late_ones(tmp_path):
    async def main():
        with one_store(tmp_path) as (store, index):
            rows = [trajectory(session_id=i) for i in range(3)]
            await store.put_trajectories(rows, [trajectory_tag(row, 1, 0, 5) for row in rows])
            assert await store.clear(["a_0_0", "a"]) == 3
            with pytest.raises(StaleWrite, match=r"ended|cleared"):
                await store.put_trajectories([rows[2]], [trajectory_tag(rows[2], 1, 0, 5)])
            with pytest.raises(StaleWrite):
                late = trajectory(session_id=7)
                await store.put_trajectories([late], [trajectory_tag(late, 1, 0, 5)])
            assert (await index.use()).rejected_writes == 2 and await store.async_kv_list() == {}

    asyncio.run(main())


def test_two_thousand_cycles_leak_nothing(tmp_path):
    check_no_leak(run_cycles(tmp_path, 2000))


def test_b073_two_hundred_large_objects_of_which_only_the_newest_is_needed_fit_into_a_fifth_of_their_bytes(tmp_path):
    with one_store(tmp_path, capacity_bytes=20 << 20) as (store, index):
        reader = Store(index, writer="r", folder=index.path, config=config())
        for turn in range(200):
            store.kv_put(f"v{turn}", "p", {"o": {"weights": bytes([turn]) * 500_000}})
            store.kv_clear([f"v{turn - 1}"], "p")
            if turn % 10 == 0:
                assert reader.get_numpy([f"v{turn}"], "p")["o"][0]["weights"][0] == turn
            assert use(index).partitions["p"].rows == 1 and use(index).segments < 3
        assert use(index).bytes_live < 600_000
        reader._reader.mappings.release_unlinked()
        assert len(reader._reader.mappings) <= 3


def test_b068_a_file_that_cannot_be_removed_is_tried_again_and_its_rows_are_gone_all_the_same(tmp_path):
    with one_store(tmp_path) as (store, index):
        store.kv_batch_put(["big"], "p", block(300))
        name = index._pool.segments[1].ref.name
        (index.path / name).rename(tmp_path / "kept")
        (index.path / name).mkdir()  # unlink fails on a folder
        assert store.kv_clear(["big"], "p") == 1 and use(index).bytes_live == 0
        assert use(index).bytes_allocated >= 300 * KB  # it still takes room
        with pytest.raises(MissingKey):
            store.get_numpy(["big"], "p")
        (index.path / name).rmdir()
        (tmp_path / "kept").rename(index.path / name)
        store.kv_batch_put(["small"], "p", block(1))
        assert use(index).bytes_allocated == 64 * KB and not (index.path / name).exists()


def test_rows_beyond_four_gibibytes_are_found_over_the_wire(tmp_path):
    async def main():
        with one_store(tmp_path) as (_, index):
            ref, base = SegmentRef(7, "0" * 32, 1, 6 << 30), (5 << 30) + 64
            with open(index.path / ref.name, "wb") as file:  # sparse
                file.truncate(ref.size_bytes)
            stamp_generation(index.path / ref.name, 1)
            index._pool.assign(ref, "far#1", 1)
            remote: IndexCalls = connect(IndexCalls, Service(IndexCalls, index).handle)
            (column,) = encode_columns({"x": [np.arange(3), np.arange(2)]}, 2)
            with open(index.path / ref.name, "r+b") as file:
                file.seek(base)
                file.write(np.concatenate([np.arange(3), np.arange(2)]).tobytes())
            await remote.put(PutRequest("far#1", "p", ["a", "b"], [ColumnPut("x", column.spec, base, column.lengths)], 7))
            store = Store(remote, writer="near", folder=None, config=config())
            assert [x.tolist() for x in (await store.async_get_numpy(["b", "a"], "p"))["x"]] == [[0, 1], [0, 1, 2]]
            huge = ColumnPut("y", column.spec, 64, [(5 << 30) // 8, 1])  # a single row of 5 GiB
            await remote.put(PutRequest("far#1", "p", ["c", "d"], [huge], 7))
            assert (await remote.locate("p", ["d"], ["y"], False)).columns[0].runs == [(7, 64 + (5 << 30), 8)]
            assert (await remote.use()).bytes_live == (5 << 30) + 6 * 8
            with pytest.raises(ProtocolError, match="inside its segment"):
                await remote.put(PutRequest("far#1", "p", ["e"], [ColumnPut("y", column.spec, 64, [(6 << 30) // 8])], 7))

    asyncio.run(main())


def test_plain_verbs_run_on_the_given_loop_from_another_thread(tmp_path):
    async def main():
        with one_store(tmp_path) as (_, index):
            store = Store(index, writer="learner", folder=index.path, config=config(), loop=asyncio.get_running_loop())

            def rank():
                store.kv_batch_put(["a", "b"], "p", {"x": np.arange(2)})
                return store.kv_batch_get(["b"], "p")["x"].tolist()

            assert await asyncio.to_thread(rank) == [1]
            await store.aclose()
            assert (await index.use()).segments == 1  # sealed, its rows stay
            assert (await store.async_get_numpy(["a"], "p"))["x"] == [0]

    asyncio.run(main())


def test_a_cancelled_put_leaves_no_segment_behind(tmp_path):
    async def main():
        with one_store(tmp_path, put_timeout_s=5) as (store, index):
            await store.async_kv_batch_put(["first"], "p", block(900))
            other = Store(index, writer="o", folder=index.path, config=config(put_timeout_s=5))
            waiting = asyncio.create_task(other.async_kv_batch_put(["k"], "p", block(20)))
            other_big = asyncio.create_task(store.async_kv_batch_put(["m"], "p", block(500)))
            await asyncio.sleep(0.05)
            for task in (waiting, other_big):
                task.cancel()
            await asyncio.gather(waiting, other_big, return_exceptions=True)
            await store.async_kv_clear(["first"], "p")
            await asyncio.sleep(0.05)
            await other.async_kv_batch_put(["k"], "p", block(20, 9))
            await store.async_kv_batch_put(["m"], "p", block(20, 9))
            await other.async_kv_clear(["k", "m"], "p")
            await asyncio.gather(other.aclose(), store.aclose())
            assert (await index.use()).bytes_allocated == 0

    asyncio.run(main())


def test_a_lend_that_a_dead_writer_left_waiting_gets_nothing(tmp_path):
    async def main():
        index = StoreIndex(tmp_path, "x", config(capacity_bytes=1 << 20, segment_bytes=1 << 16, put_timeout_s=5), os.getpid())
        held = [await index.lend("b#1", 1000, number) for number in range(1, 17)]
        waiting = asyncio.create_task(index.lend("a#1", 1000, 1))
        await asyncio.sleep(0.02)
        await index.writer_gone("a")
        successor = asyncio.create_task(index.lend("a#2", 1000, 1))
        await asyncio.sleep(0.02)
        await index.seal("b#1", [ref.segment_id for ref in held[:2]])
        with pytest.raises(StaleWrite, match="died while it waited"):
            await asyncio.wait_for(waiting, 1)
        assert (await asyncio.wait_for(successor, 1)).segment_id
        index.close()

    asyncio.run(main())

"""What the store owes after a kill: the journal gives back the same index, live writers go on, and nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.dataplane import IndexCalls, Store, StoreIndex, has_journal, journalled_folder, sweep
from streamrl.dataplane.journal import Journal, Put, State, read_journal
from streamrl.errors import ActorDied, ProtocolError, StaleWrite, StoreFull
from streamrl.protocol.rpc import Service, connect
from streamrl.protocol.segments import PutRequest
from tests.dataplane.store_world import config

KB = 1024


@contextmanager
def life(folder: Path, **changes: Any) -> Iterator[StoreIndex]:
    """One life of the index; it ends without a word, as by a kill."""
    ledger, shm = folder / "ledger", folder / "shm"
    shm.mkdir(exist_ok=True)
    settings = config(**({"put_timeout_s": 30, "spill_dir": str(folder / "spill")} | changes))  # 30 s: busy machines
    index = StoreIndex.recover(ledger, settings, os.getpid()) if has_journal(ledger) else StoreIndex(shm, "test", settings, os.getpid(), ledger)
    try:
        yield index
    finally:
        index.detach()


def client(index: IndexCalls, writer: str = "w") -> Store:
    return Store(index, writer=writer, folder=None, config=config(put_timeout_s=30))


def row(value: int, size: int = 4) -> dict[str, Any]:
    return {"x": [np.full(size, value)], "o": [{"v": value}]}


def contents(index: StoreIndex) -> bytes:
    return msgspec.msgpack.encode(index._state())


OPS = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 3), st.integers(0, 2), st.integers(1, 3), st.integers(0, 900)),
    st.tuples(st.just("back"), st.integers(0, 3), st.integers(0, 2), st.integers(0, 900)),
    st.tuples(st.just("clear"), st.integers(0, 3), st.integers(0, 2)),
    st.tuples(st.just("end"), st.integers(0, 3)),
    st.tuples(st.just("gone"), st.integers(0, 1)),
    st.tuples(st.just("spill"), st.integers(0, 3)),
)


async def do(index: StoreIndex, stores: list[Store], op: tuple) -> None:
    try:
        match op:
            case ("put", group, session, attempt, size):
                await stores[group % 2].async_kv_batch_put([f"u{group}_{session}_0"], "train", row(size, size), [{"attempt": attempt, "seq_no": group}])
            case ("back", group, session, size):
                await stores[session % 2].async_kv_batch_put([f"u{group}_{session}_0"], "train", {"back": [np.arange(size, dtype=np.float32)]})
            case ("clear", group, session):
                await stores[0].async_kv_clear([f"u{group}_{session}_0"], "train")
            case ("end", group):
                await stores[0].clear([f"u{group}"])
            case ("spill", group):
                await index.spill("train", [], [f"u{group}"])
            case ("gone", number):
                await index.writer_gone(f"w{number}")
    except StaleWrite:
        pass
    except ProtocolError as error:  # a segment of a writer that was declared dead: its next put gets another
        assert "lent to it" in str(error)


@settings(max_examples=60, deadline=None)
@given(st.lists(OPS, max_size=40), st.sampled_from([1, 2000, 1 << 20]))
def test_the_journal_gives_back_the_same_index_whatever_happened_and_wherever_it_was_rotated(ops, rotate_bytes):
    async def main(folder: Path) -> None:
        with life(folder) as index:
            index._journal._rotate_bytes = rotate_bytes
            stores = [client(index, f"w{i}") for i in range(2)]
            for op in ops:
                await do(index, stores, op)
            before = contents(index)
            rows = {key: await stores[0].async_get_numpy([key], "train") for key in (await index.tags(None)).get("train", {})}
        with life(folder) as index:
            assert contents(index) == before and index.lost_keys == {}
            assert len(list((folder / "ledger").iterdir())) == 1
            reader = client(index)
            for key, value in rows.items():
                again = await reader.async_get_numpy([key], "train")
                assert all(np.array_equal(a, b) for name in value for a, b in zip(value[name], again[name], strict=True))
            index.close()
        assert not list((folder / "shm").iterdir()) and not any((folder / "spill").glob("*")) and not has_journal(folder / "ledger")

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(folder)))


class Restarting:
    """Carries a client's calls to the index of the moment and repeats those whose answer was lost. The next answer is lost after ``lose()``."""

    def __init__(self) -> None:
        self.index: StoreIndex | None = None
        self.losing = False
        self.calls = connect(IndexCalls, self._send)

    async def _send(self, method: str, payload: bytes) -> bytes:
        answer = await Service(IndexCalls, self.index).handle(method, payload)
        if self.losing:
            self.losing = False
            return await self._send(method, payload)
        return answer


def test_a_live_writer_goes_on_in_its_segment_after_the_index_was_restarted(tmp_path):
    async def main():
        way = Restarting()
        writer, reader = client(way.calls, "rollout-0"), client(way.calls, "learner-0")
        with life(tmp_path) as way.index:
            await writer.async_kv_batch_put(["a"], "p", row(1), [{"t": 1}])
        with life(tmp_path) as way.index:
            await writer.async_kv_batch_put(["b"], "p", row(2))
            assert (await reader.async_get_numpy(["b", "a"], "p"))["o"] == [{"v": 2}, {"v": 1}]
            assert (await way.index.use()).segments == 1  # the same one
            await writer.aclose()
            await reader.async_kv_clear(["a", "b"], "p")
            assert (await way.index.use()).bytes_allocated == 0
            way.index.close()

    asyncio.run(main())


def test_a_put_whose_answer_was_lost_is_carried_out_once(tmp_path):
    async def main():
        way = Restarting()
        writer = client(way.calls)
        with life(tmp_path) as way.index:
            await writer.async_kv_batch_put(["k"], "p", row(1), [{"n": 1}])
            way.losing = True
            await writer.async_kv_batch_put(["k"], "p", row(2), [{"n": 2}])
            assert (await way.index.use()).bytes_live == 4 * 8 + 4 + 0
            first = next(r.request for r in read_journal(tmp_path / "ledger") if isinstance(r, Put))
            await way.index.put(first)  # late, and the row has newer bytes
            assert await writer.async_get_numpy(["k"], "p", ["o"]) == {"o": [{"v": 2}]}
            await writer.async_kv_clear(["k"], "p")
        with life(tmp_path) as way.index:
            await way.index.put(first)  # after a restart, of a row that was cleared
            assert await way.index.tags(None) == {}
            way.index.close()

    asyncio.run(main())


def test_a_lend_whose_answer_was_lost_gives_the_same_segment(tmp_path):
    async def main():
        with life(tmp_path) as index:
            first = await index.lend("w#1", 10, 1)
            assert await index.lend("w#1", 10, 1) == first
            one, other = await asyncio.gather(index.lend("w#1", 10, 2), index.lend("w#1", 10, 2))
            assert one == other != first and (await index.use()).segments == 2
        with life(tmp_path) as index:
            assert await index.lend("w#1", 10, 1) == first
            index.close()

    asyncio.run(main())


def test_rows_of_segments_that_are_gone_are_named_and_the_others_stay(tmp_path):
    async def main():
        with life(tmp_path) as index:
            one, two = client(index, "one"), client(index, "two")
            await one.async_kv_batch_put(["a", "b"], "p", {"x": np.arange(2)})
            await two.async_kv_batch_put(["c", "d"], "p", {"x": np.arange(2)})
            await two.async_kv_batch_put(["a"], "q", None, [{"only": "a tag"}])
            await two.async_kv_batch_put(["b"], "p", {"late": np.arange(1)})
            (index.path / index._pool.segments[1].ref.name).unlink()
        with life(tmp_path) as index:
            assert index.lost_keys == {"p": ["a", "b"]}
            assert await index.tags(None) == {"p": {"c": {}, "d": {}}, "q": {"a": {"only": "a tag"}}}
            assert (await index.use()).segments == 1
        with life(tmp_path) as index:
            assert index.lost_keys == {}
            index.close()

    asyncio.run(main())


def test_after_a_restart_of_the_machine_the_index_is_empty_and_says_so(tmp_path):
    async def main():
        with life(tmp_path) as index:
            await client(index).async_kv_batch_put(["a"], "p", row(1))
            for path in index.path.iterdir():
                path.unlink()
            index.path.rmdir()
        with life(tmp_path) as index:
            assert index.lost_keys == {"p": ["a"]} and (await index.use()).bytes_allocated == 0
            await client(index).async_kv_batch_put(["a"], "p", row(2))
            index.close()

    asyncio.run(main())


DRIVER = """
import asyncio, os, sys
from pathlib import Path
import numpy as np
from streamrl.dataplane import Store, StoreIndex
from tests.dataplane.store_world import config
folder = Path(sys.argv[1])
async def main():
    index = StoreIndex(folder / "shm", "test", config(), os.getpid(), folder / "ledger")
    store = Store(index, writer="rollout-0", folder=None, config=config())
    for i in range(10**9):
        await store.async_kv_batch_put([f"u{i % 50}_{i}_0"], "train", {"x": [np.full(50, i)]}, [{"attempt": 1, "i": i}])
        if i >= 50:
            await store.async_kv_clear([f"u{i % 50}_{i - 50}_0"], "train")
        print(i, flush=True)
asyncio.run(main())
"""


def test_acknowledged_rows_survive_the_kill_of_every_process_and_their_folder_is_not_swept(tmp_path):
    (tmp_path / "shm").mkdir()
    process = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    acknowledged = -1
    assert process.stdout is not None
    for line in process.stdout:
        acknowledged = int(line)
        if acknowledged >= 300:
            process.send_signal(signal.SIGKILL)
            break
    acknowledged = max([acknowledged, *map(int, process.stdout.read().split("\n")[:-1])])
    process.stdout.close()
    process.wait()

    ledger = tmp_path / "ledger"
    folder = journalled_folder(ledger)
    assert folder is not None and sweep(tmp_path / "shm", keep=[folder]) == [] and folder.is_dir()

    async def main():
        index = StoreIndex.recover(ledger, config(), os.getpid())
        kept = (await index.tags("train"))["train"]
        numbers = sorted(tag["i"] for tag in kept.values())
        assert numbers[-1] in (acknowledged, acknowledged + 1) and index.lost_keys == {}
        assert numbers == list(range(numbers[0], numbers[-1] + 1)) and 50 <= len(numbers) <= 51
        store = client(index)
        values = await store.async_get_numpy(list(kept), "train")
        assert all((x == tag["i"]).all() for x, tag in zip(values["x"], kept.values(), strict=True))
        assert all(segment.writer is None for segment in index._pool.segments.values())  # sealed: their writers died
        assert sweep(tmp_path / "shm") == []  # the folder has a living owner again
        await store.async_kv_clear(list(kept), "train")
        assert (await index.use()).bytes_allocated == 0
        index.close()

    asyncio.run(main())
    assert sweep(tmp_path / "shm") == []


def test_a_journal_without_room_refuses_the_change_and_leaves_the_index_as_it_was(tmp_path):
    async def main():
        with life(tmp_path) as index:
            store = client(index)
            await store.async_kv_batch_put(["a"], "p", row(1), [{"n": 1}])
            whole = index._journal._file
            index._journal._file = FullFile(whole)
            before = contents(index)
            for change in (store.async_kv_batch_put(["a", "b"], "p", {"x": [np.arange(2)] * 2}), store.async_kv_clear(["a"], "p")):
                with pytest.raises(StoreFull, match="journal is on a device with room"):
                    await change
            assert contents(index) == before
            with pytest.raises(StoreFull):
                await index.lend("other", 5, 1)
            assert (await index.use()).segments == 1
            index._journal._file = whole
            await store.async_kv_batch_put(["b"], "p", row(2))
            index.close()

    asyncio.run(main())


class FullFile:
    """The file of a journal on a device that has run full."""

    def __init__(self, real: Any) -> None:
        self.path, self.size_bytes = real.path, real.size_bytes

    def append(self, *payloads: bytes) -> None:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        """Nothing is open."""


def test_a_journal_that_was_being_rotated_when_all_died_is_read_from_its_newest_whole_file(tmp_path):
    state = State("/nowhere")
    journal = Journal(tmp_path, lambda: state)
    journal.append(Put(PutRequest("w", "p", ["k"], [])))
    (tmp_path / "store-000002.new").write_bytes(b"half")
    assert [type(record) for record in read_journal(tmp_path)] == [State, Put] and journalled_folder(tmp_path) == Path("/nowhere")
    journal.close()
    (tmp_path / "store-000001.journal").rename(tmp_path / "store-000999.journal")  # rotated, the older ones not yet deleted
    Journal(tmp_path, lambda: state).close()
    assert {path.name for path in tmp_path.glob("*.journal")} == {"store-001000.journal"}


def test_what_is_no_journal_of_a_store_is_refused(tmp_path):
    with pytest.raises(ProtocolError, match="got none in"):
        StoreIndex.recover(tmp_path, config(), os.getpid())
    assert journalled_folder(tmp_path) is None
    (tmp_path / "store-000001.journal").write_bytes(b"something else")
    with pytest.raises(ProtocolError, match="another kind of file"):
        StoreIndex.recover(tmp_path, config(), os.getpid())


def test_a_call_that_dies_on_its_way_fails_the_put_and_loses_no_segment(tmp_path):
    class Dying:
        """Fails every call but the first ``left``."""

        left = 2

        def __getattr__(self, name: str) -> Any:
            async def call(*args: Any) -> Any:
                self.left -= 1
                if self.left < 0:
                    raise ActorDied(f"{name} of store was not answered")
                return await getattr(index, name)(*args)

            return call

    async def main():
        nonlocal index
        with life(tmp_path) as index:
            way: Any = Dying()
            store = client(way)
            with pytest.raises(ActorDied, match="put of store"):
                await store.async_kv_batch_put(["big"], "p", {"x": [np.zeros(50 * KB, np.uint8)]})
            way.left = 1 << 20
            await store.async_kv_batch_put(["k"], "p", row(1))
            await store.aclose()
            await store.async_kv_clear(["k"], "p")
            assert (await index.use()).bytes_allocated == 0
            index.close()

    index: Any = None
    asyncio.run(main())

"""The store beside TransferQueue doing the same work, in one run: ``python -m tests.benchmarks.store_speed [--repeats 15]``.

Rows have six ragged int64 columns of 2,048 entries on average and a tag. Ours and theirs take turns, so that a busy machine slows both; every call
is a plain blocking verb of this process. *ours* is a client of a store with a journal in another process, over the channel: what a rollout actor or a
learner rank has, its plain verbs in the calling thread. *in process* has the index beside the client, which leaves the copies and the index work.
Without TransferQueue (0.1.11 from PyPI) only ours is measured.

Bars: put, get and write-back at most a tenth of TransferQueue's time, a list of 20,000 tags no slower; a get of 256 rows at most twice a bare gather
of the same pieces into buffers of the same kind. Keys are new in every turn and cleared outside of the times.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import uvloop
from tensordict import TensorDict

from streamrl.config.rollout import DataplaneConfig
from streamrl.dataplane import IndexCalls, Store, StoreIndex
from streamrl.dataplane.segments import SegmentReader
from streamrl.protocol.channel import BlockingChannel, ChannelClient, ChannelServer
from streamrl.protocol.rpc import Service, connect

NUM_COLUMNS, MEAN_TOKENS, SPREAD_TOKENS, NUM_TAGS = 6, 2048, 1024, 20_000
SIZES = (1, 64, 256)
WARM_TURNS = 12  # of the largest size: 300 MB, through five segments
CONFIG = DataplaneConfig(capacity_bytes=2 << 30)
SOCKET = "store.sock"


class Line(NamedTuple):
    """One operation: medians in milliseconds by who did it; ``bar``: the most that *ours* may take of *against*."""

    name: str
    ms: dict[str, float]
    against: str
    bar: float

    @property
    def share(self) -> float:
        return self.ms["ours"] / self.ms[self.against] if self.against in self.ms else 0.0


class Verbs(NamedTuple):
    """The five verbs of one contestant."""

    put: Callable[[list[str], Any, list[dict]], Any]
    put_one: Callable[[str, Any, dict], Any]
    get: Callable[[list[str]], Any]
    list: Callable[[str], Any]
    put_tags: Callable[[list[str], list[dict]], Any]
    clear: Callable[[list[str]], Any]


def rows(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Six columns of one length a row."""
    numbers = torch.Generator().manual_seed(seed)
    lengths = torch.randint(MEAN_TOKENS - SPREAD_TOKENS, MEAN_TOKENS + SPREAD_TOKENS + 1, (count,), generator=numbers).tolist()
    return [{f"column{c}": torch.randint(0, 50_000, (n,), generator=numbers) for c in range(NUM_COLUMNS)} for n in lengths]


def batch(of: list[dict[str, torch.Tensor]], names: list[str] | None = None) -> TensorDict:
    columns = {name: torch.nested.as_nested_tensor([row[name] for row in of], layout=torch.jagged) for name in names or of[0]}
    return TensorDict(columns, batch_size=[len(of)])


def tag(row: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"status": "success", "seq_len": row["column0"].numel(), "global_steps": 3}


# ---- the contestants --------------------------------------------------------------------------------------------------------------------


def serve(folder: Path) -> None:
    """The process of the store."""

    async def main() -> None:
        index = StoreIndex(Path(CONFIG.shm_dir), "speed", CONFIG, os.getpid(), folder / "ledger")
        service = Service(IndexCalls, index)
        server = ChannelServer(folder / SOCKET, service.handle, service.handle_at_once)
        await server.start()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.close()
        index.close()

    uvloop.run(main())


@contextmanager
def loop_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """The loop of an actor, beside the thread that calls the plain verbs."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def store_in_another_process(folder: Path, loop: asyncio.AbstractEventLoop) -> Iterator[Store]:
    process = subprocess.Popen([sys.executable, "-m", __spec__.name, "--serve", str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == b"ready\n"

    blocking = BlockingChannel(folder / SOCKET, "store", 60.0)

    async def client() -> tuple[ChannelClient, Store]:
        channel = ChannelClient(folder / SOCKET, "store", 60.0)
        direct = connect(IndexCalls, blocking.send)
        return channel, Store(connect(IndexCalls, channel.send), writer="w", folder=None, config=CONFIG, loop=loop, direct=direct)

    channel, store = asyncio.run_coroutine_threadsafe(client(), loop).result()
    try:
        yield store
        store.close()
        loop.call_soon_threadsafe(channel.close)
        blocking.close()
    finally:
        process.stdin.close()
        process.wait()


@contextmanager
def store_in_process(loop: asyncio.AbstractEventLoop) -> Iterator[Store]:
    index = StoreIndex(Path(CONFIG.shm_dir), "speed", CONFIG, os.getpid())
    try:
        yield Store(index, writer="w", folder=None, config=CONFIG, loop=loop)
    finally:
        index.close()


def of_store(store: Store) -> Verbs:
    return Verbs(
        lambda keys, fields, tags: store.kv_batch_put(keys, "train", fields, tags),
        lambda key, fields, tag: store.kv_put(key, "train", fields, tag),
        lambda keys: store.kv_batch_get(keys, "train"),
        store.kv_list,
        lambda keys, tags: store.kv_batch_put(keys, "tags", None, tags),
        lambda keys: store.kv_clear(keys, "train"),
    )


@contextmanager
def transfer_queue() -> Iterator[Verbs]:
    import ray
    import transfer_queue as queue

    ray.init(num_cpus=16, object_store_memory=2 << 30, include_dashboard=False, logging_level="ERROR", log_to_driver=False)  # it waits for ever on 2 CPUs
    queue.init()
    yield Verbs(
        lambda keys, fields, tags: queue.kv_batch_put(keys, "train", fields, tags),
        lambda key, fields, tag: queue.kv_put(key, "train", fields, tag),
        lambda keys: queue.kv_batch_get(keys, "train"),
        queue.kv_list,
        lambda keys, tags: queue.kv_batch_put(keys, "tags", None, tags),
        lambda keys: queue.kv_clear(keys, "train"),
    )
    queue.close()
    ray.shutdown()


# ---- the measurement --------------------------------------------------------------------------------------------------------------------


def measure(store: Store, contestants: dict[str, Verbs], repeats: int, sizes: tuple[int, ...], num_tags: int) -> list[Line]:
    """All operations, in the state that a long run is in: every segment and buffer has been used before. A size's first turns are not counted."""
    for turn in range(WARM_TURNS):
        of = rows(max(sizes), turn)
        keys = [f"warm{turn}_{i}_0" for i in range(len(of))]
        for verbs in contestants.values():
            _one_turn(verbs, keys, of, None, False)
            verbs.clear(keys)
    lines = [_list_line(contestants, repeats, num_tags)]
    for count in sizes:
        times: dict[str, dict[str, list[float]]] = {}
        for turn in range(-3, repeats):
            of = rows(count, turn + 3)
            keys = [f"s{count}t{turn + 3}_{i}_0" for i in range(count)]
            names = list(contestants)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                time.sleep(0.005)  # making the rows has used up this thread's share of a busy core
                gather = (lambda: _gather_s(store, keys)) if name == "ours" and count == max(sizes) else None  # noqa: B023
                taken = _one_turn(contestants[name], keys, of, gather, turn % 2 == 0)
                contestants[name].clear(keys)
                if turn >= 0:
                    for operation, seconds in taken.items():
                        times.setdefault(operation, {}).setdefault(name, []).append(seconds)
        lines += _lines(times, count)
    return lines


def _one_turn(verbs: Verbs, keys: list[str], of: list[dict[str, torch.Tensor]], gather: Callable[[], float] | None, gather_first: bool) -> dict[str, float]:
    """Get and gather change places: the second finds the pieces in the caches."""
    fields, tags = batch(of), [tag(row) for row in of]
    back = TensorDict({"advantages": batch(of, ["column0"])["column0"].float()}, batch_size=[len(of)])
    taken = {}
    if len(keys) == 1:
        taken["put"] = _seconds(lambda: verbs.put_one(keys[0], of[0], tags[0]))
    else:
        taken["put"] = _seconds(lambda: verbs.put(keys, fields, tags))
    if gather is not None and gather_first:
        taken["gather"] = gather()
    taken["get"] = _seconds(lambda: verbs.get(keys))
    if gather is not None and not gather_first:
        taken["gather"] = gather()
    taken["write back"] = _seconds(lambda: verbs.put(keys, back, [{} for _ in keys]))
    return taken


def _gather_s(store: Store, keys: list[str]) -> float:
    """The same pieces by NumPy alone, out of mappings that are warm."""
    located = store._run.wait(store._way.index.locate("train", keys, [f"column{c}" for c in range(NUM_COLUMNS)], False))
    reader = store._reader
    assert isinstance(reader, SegmentReader)
    return _seconds(lambda: reader.copy([column.runs for column in located.columns], located.segments))


def _list_line(contestants: dict[str, Verbs], repeats: int, num_tags: int) -> Line:
    keys = [f"tag{i}_0_0" for i in range(num_tags)]
    for verbs in contestants.values():
        for begin in range(0, num_tags, 1000):
            some = keys[begin : begin + 1000]
            verbs.put_tags(some, [{"status": "success", "seq_len": i, "global_steps": 3} for i in range(len(some))])
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, verbs in contestants.items():
            times[name].append(_seconds(lambda verbs=verbs: verbs.list("tags")))  # type: ignore[misc]
    return Line(f"list {num_tags} tags", {name: 1e3 * statistics.median(of) for name, of in times.items()}, "TransferQueue", 1.0)


def _lines(times: dict[str, dict[str, list[float]]], count: int) -> list[Line]:
    medians = {operation: {name: 1e3 * statistics.median(of) for name, of in by.items()} for operation, by in times.items()}
    lines = [Line(f"{operation} {count}", medians[operation], "TransferQueue", 0.1) for operation in ("put", "get", "write back")]
    if "gather" in medians:
        lines.append(Line(f"get {count}", {"ours": medians["get"]["ours"], "bare gather": medians["gather"]["ours"]}, "bare gather", 2.0))
    return lines


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    result = call()
    taken = time.perf_counter() - began
    del result
    return taken


def run(repeats: int, sizes: tuple[int, ...] = SIZES, num_tags: int = NUM_TAGS) -> list[Line]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        loop = stack.enter_context(loop_thread())
        store = stack.enter_context(store_in_another_process(folder, loop))
        contestants = {"ours": of_store(store), "in process": of_store(stack.enter_context(store_in_process(loop)))}
        if importlib.util.find_spec("transfer_queue") is not None:
            contestants["TransferQueue"] = stack.enter_context(transfer_queue())
        return measure(store, contestants, repeats, sizes, num_tags)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--repeats", type=int, default=15)
    arguments.add_argument("--serve", type=Path)
    given = arguments.parse_args()
    if given.serve is not None:
        serve(given.serve)
        return
    for line in run(given.repeats):
        shown = "  ".join(f"{name} {ms:8.2f} ms" for name, ms in line.ms.items())
        verdict = f"{line.share:6.3f} of {line.against} (bar {line.bar:g}){'' if line.share <= line.bar else '  MISSED'}" if line.share else ""
        print(f"{line.name:16} {shown}  {verdict}", flush=True)


if __name__ == "__main__":
    main()

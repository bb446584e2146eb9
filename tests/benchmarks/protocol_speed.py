"""What the containers cost beside plain torch and tensordict doing the same work, in one run: ``python -m tests.benchmarks.protocol_speed``.

A batch has 1,024 rows of 2,048 tokens on average in two int64 and two float32 columns, and one scalar column. Ours and theirs take turns, so that a
busy machine slows both, and both allocate what they return. The bar of a ratio is against the first of *theirs*; the others are for comparison:
tensordict moves the padded batch (20 % longer here), since it has no row moves for jagged columns. Object columns have no counterpart in torch and
stand in lines of their own.

A page that is touched for the first time costs more than its copy, so whose memory is fresh must not be left to chance. The bars hold where every
large buffer of either side is fresh from the kernel, as buffers of more than 32 MB always are under glibc. The second table is for memory that the
process has kept: there one long copy streams past the caches, which a copy row by row cannot, torch.cat's neither, and it misses most bars.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from streamrl.protocol import KVBatchMeta
from streamrl.protocol import tensors as T
from streamrl.protocol.keys import TrajectoryKey, prompt_uid
from streamrl.protocol.trajectory import Trajectory

NUM_ROWS, MEAN_TOKENS, SPREAD_TOKENS, NUM_CHUNKS, NUM_KEYS = 1024, 2048, 400, 8, 100_000
COLUMNS = {"responses": torch.int64, "response_mask": torch.int64, "old_log_probs": torch.float32, "advantages": torch.float32}


# Parameters of glibc's mallopt, each with its value for fresh memory, for kept memory, and by default.
_MALLOPT = {"trim threshold": (-1, 128 << 10, 1 << 30, 128 << 10), "mmap threshold": (-3, 256 << 10, 256 << 10, 128 << 10), "mmap max": (-4, 65536, 0, 65536)}


@contextlib.contextmanager
def memory(kept: bool) -> Iterator[None]:
    """Large buffers are fresh from the kernel, or come from freed memory that the process has kept. Without glibc nothing changes; with it, the
    threshold that glibc would raise by itself stays at its default afterwards."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda parameter, value: 0)
    for parameter, fresh_value, kept_value, _ in _MALLOPT.values():
        mallopt(parameter, kept_value if kept else fresh_value)
    try:
        yield
    finally:
        for parameter, _, _, default in _MALLOPT.values():
            mallopt(parameter, default)


class Speed(NamedTuple):
    """One operation. ``times_s`` are interleaved repetitions of ours and of each of theirs; ``bar`` is a ratio, or seconds without theirs."""

    name: str
    bar: float
    times_s: dict[str, list[float]]

    def ratio(self, theirs: str, of: Callable[[list[float]], float] = statistics.median) -> float:
        return of(self.times_s["ours"]) / of(self.times_s[theirs])

    @property
    def against(self) -> list[str]:
        return [name for name in self.times_s if name != "ours"]


def interleaved(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, taking turns; what a call returns is freed outside of its time."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            began = time.perf_counter()
            result = call()
            times[name].append(time.perf_counter() - began)
            del result
    return times


def rows_of_tokens() -> list[dict[str, Any]]:
    dice = random.Random(0)
    lengths = [dice.randint(MEAN_TOKENS - SPREAD_TOKENS, MEAN_TOKENS + SPREAD_TOKENS) for _ in range(NUM_ROWS)]
    return [{name: torch.ones(n, dtype=dtype) for name, dtype in COLUMNS.items()} | {"num_turns": torch.tensor(2)} for n in lengths]


def batch_speeds(repeats: int) -> list[Speed]:
    """Build, select, reorder, chunk and concat of a jagged batch."""
    rows = rows_of_tokens()
    td = T.list_of_dict_to_tensordict(rows)
    by_column = {name: [row[name] for row in rows] for name in COLUMNS}
    scalars, values = [row["num_turns"] for row in rows], [td.get(name).values() for name in COLUMNS]
    padded = TensorDict({name: T.to_padded_tensor(td.get(name)) for name in COLUMNS}, batch_size=[NUM_ROWS])
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(0))
    half = order[: NUM_ROWS // 2]
    half_values = [T.index_select(td, half).get(name).values() for name in COLUMNS]  # type: ignore[union-attr]
    parts, padded_parts = T.chunk_tensordict(td, NUM_CHUNKS), padded.split(NUM_ROWS // NUM_CHUNKS)
    part_values = [[part.get(name).values() for part in parts] for name in COLUMNS]

    def clone(buffers: list[torch.Tensor]) -> list[torch.Tensor]:
        return [buffer.clone() for buffer in buffers]

    cases: list[tuple[str, float, dict[str, Callable[[], Any]]]] = [
        (
            "build",
            1.5,
            {
                "ours": lambda: T.list_of_dict_to_tensordict(rows),
                "torch.cat": lambda: [torch.cat(column) for column in by_column.values()] + [torch.stack(scalars)],
                "torch.nested": lambda: [torch.nested.nested_tensor(column, layout=torch.jagged) for column in by_column.values()],
            },
        ),
        ("reorder", 2, {"ours": lambda: T.index_select(td, order), "clone": lambda: clone(values), "tensordict": lambda: padded[order]}),
        ("select half", 2, {"ours": lambda: T.index_select(td, half), "clone": lambda: clone(half_values), "tensordict": lambda: padded[half]}),
        (
            f"chunk {NUM_CHUNKS}",
            2,
            {
                "ours": lambda: T.chunk_tensordict(td, NUM_CHUNKS),
                "clone": lambda: clone(values),
                "tensordict": lambda: [part.clone() for part in padded.split(NUM_ROWS // NUM_CHUNKS)],
            },
        ),
        (
            f"concat {NUM_CHUNKS}",
            2,
            {
                "ours": lambda: T.concat_tensordict(parts),
                "torch.cat": lambda: [torch.cat(column) for column in part_values],
                "tensordict": lambda: torch.cat(padded_parts),  # type: ignore[call-overload]
            },
        ),
    ]
    return [Speed(name, bar, interleaved(calls, repeats)) for name, bar, calls in cases]


def object_speeds(repeats: int) -> list[Speed]:
    """Build and reorder of one object column, in seconds."""
    uids = [prompt_uid(0, 0, i) for i in range(NUM_ROWS)]
    td = T.get_tensordict({"uid": uids})
    calls: dict[str, Callable[[], Any]] = {
        "build": lambda: T.get_tensordict({"uid": uids}),
        "reorder": lambda: T.index_select(td, range(NUM_ROWS - 1, -1, -1)),
    }
    return [Speed(f"objects {name}", 0.02, interleaved({"ours": call}, repeats)) for name, call in calls.items()]


def meta_speeds(repeats: int) -> list[Speed]:
    """The operations of a KVBatchMeta of 100,000 keys with real tags."""
    from streamrl.protocol.fields import trajectory_tag

    keys = [TrajectoryKey(prompt_uid(0, 0, i // 8), i % 8, 0) for i in range(NUM_KEYS)]
    row = Trajectory(keys[0], [1] * 100, [1] * 200, [1] * 200, None, [3] * 200, 1.0, 2, "eos")
    sample = trajectory_tag(row, attempt=1, seq_no=0, global_steps=3)
    names, tags = [str(key) for key in keys], [sample | {"seq_no": i} for i in range(NUM_KEYS)]
    meta = KVBatchMeta("train", names, tags, ["responses"], {"step": 3})
    order = random.Random(0).sample(range(NUM_KEYS), NUM_KEYS)
    wanted, parts = [names[i] for i in order], meta.chunk(NUM_CHUNKS)
    moved = KVBatchMeta("train", names, tags)  # reorder is in place
    calls: dict[str, Callable[[], Any]] = {
        "construct": lambda: KVBatchMeta("train", names, tags, ["responses"], {"step": 3}),
        "select_keys": lambda: meta.select_keys(wanted),
        "reorder": lambda: moved.reorder(order),
        f"chunk {NUM_CHUNKS}": lambda: meta.chunk(NUM_CHUNKS),
        f"concat {NUM_CHUNKS}": lambda: KVBatchMeta.concat(parts),
        "with_fields": lambda: meta.with_fields(["prompts"]),
    }
    return [Speed(f"KVBatchMeta {name}", 0.1, interleaved({"ours": call}, repeats)) for name, call in calls.items()]


def line(speed: Speed) -> str:
    ours, best = statistics.median(speed.times_s["ours"]), min(speed.times_s["ours"])
    if not speed.against:  # judged by the best repetition: a busy machine can only add to a time
        return f"{speed.name:<24}{ours * 1e3:8.1f} ms   bar {speed.bar * 1e3:.0f} ms   {'ok' if best < speed.bar else 'MISSED'}   best {best * 1e3:.1f} ms"
    ratios = [f"{speed.ratio(name):5.2f} x {name} ({statistics.median(speed.times_s[name]) * 1e3:.1f} ms)" for name in speed.against]
    return f"{speed.name:<24}{ours * 1e3:8.1f} ms   bar {speed.bar:.1f} x   {'ok' if speed.ratio(speed.against[0]) <= speed.bar else 'MISSED'}   " + ", ".join(
        ratios
    )


def main() -> None:
    torch.set_num_threads(1)  # a controller has one core to itself at most
    for kept in (False, True):
        print(f"\nbuffers from {'kept' if kept else 'fresh'} memory")
        with memory(kept):
            for speed in batch_speeds(repeats=15):
                print(line(speed))
    print("\nwithout a counterpart")
    for speed in [*object_speeds(repeats=15), *meta_speeds(repeats=7)]:
        print(line(speed))


if __name__ == "__main__":
    main()

"""What the replay buffer costs: pushes a second with and without the journal, take() with few and many resident keys, memory a key.

``python -m tests.benchmarks.replay_speed`` prints one line each beside its bar. Groups have 8 sessions of one row; tags are those of a real row.
The journal lies in the given folder (``--folder``, default: the system's temporary folder).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import uvloop

from streamrl.config.rollout import ReplayConfig
from streamrl.protocol.channel import ChannelClient, ChannelServer
from streamrl.protocol.fields import trajectory_tag
from streamrl.protocol.groups import SessionPush
from streamrl.protocol.interfaces import LeaseSource
from streamrl.protocol.keys import TrajectoryKey, prompt_uid
from streamrl.protocol.rpc import Service, connect
from streamrl.protocol.trajectory import Prompt
from streamrl.replay import BufferSpec, JournalledBuffer, ReplayBuffer, ReplayService
from streamrl.testing.rows import make_trajectory

SESSIONS = 8
ROW = {"raw_prompt": [{"role": "user", "content": "What is 17 + 25? " * 8}], "data_source": "tiny", "reward_model": {"ground_truth": "42"}}


class Line(NamedTuple):
    """One measurement against its bar; ``floor`` says whether more is better."""

    name: str
    value: float
    unit: str
    bar: float | None = None
    floor: bool = True

    def holds(self) -> bool:
        return self.bar is None or (self.value >= self.bar if self.floor else self.value <= self.bar)

    def text(self) -> str:
        bar = "" if self.bar is None else f"  (bar {'>=' if self.floor else '<='} {self.bar:,.0f} {self.unit}{'' if self.holds() else ': MISSED'})"
        return f"{self.name:<44}{self.value:>12,.{0 if self.value >= 100 else 3}f} {self.unit}{bar}"


def make(num_groups: int, folder: Path | None) -> ReplayBuffer | JournalledBuffer:
    spec = BufferSpec(ReplayConfig(max_staleness=1), groups_per_step=num_groups, n=SESSIONS)
    if folder is not None:
        return JournalledBuffer.open(folder, spec)
    return ReplayBuffer(spec.config, groups_per_step=spec.groups_per_step, n=spec.n)


def make_pushes(buffer: ReplayBuffer | JournalledBuffer, num_groups: int) -> list[SessionPush]:
    """All sessions of ``num_groups`` leased groups."""
    buffer.admit([Prompt(prompt_uid(7, 0, i), ROW, 0, i) for i in range(num_groups)])
    tag = trajectory_tag(make_trajectory("u", 0, response_ids=tuple(range(200))), 1, 0, 0)
    pushes = []
    for lease in buffer.lease("rollout-0", num_groups).leases:
        for session in range(SESSIONS):
            keys = [str(TrajectoryKey(lease.uid, session, 0))]
            pushes.append(SessionPush(lease.uid, lease.attempt, session, keys, [dict(tag, seq_no=lease.seq_no)], scores={"score": 1.0}))
    return pushes


def pushes_per_s(num_groups: int, folder: Path | None) -> float:
    """Per second of one core's time, the kernel's share of the writes included: a busy machine does not change it."""
    buffer = make(num_groups, folder)
    pushes = make_pushes(buffer, num_groups)
    gc.collect()
    begin = time.process_time()
    for push in pushes:
        buffer.push(push)
    return len(pushes) / (time.process_time() - begin)


def pushes_per_s_over_a_channel(num_groups: int, folder: Path) -> float:
    """As a rollout actor pushes, 64 at a time, with both ends on one core; by the clock."""

    async def main() -> float:
        buffer = make(num_groups, folder / "ledger")
        assert isinstance(buffer, JournalledBuffer)
        pushes = make_pushes(buffer, num_groups)
        server = ChannelServer(folder / "replay.sock", Service(LeaseSource, ReplayService(buffer, clear=_cleared, missing=_none_missing)).handle)
        await server.start()
        channel = ChannelClient(folder / "replay.sock", "replay", 60.0)
        replay, slots = connect(LeaseSource, channel.send), asyncio.Semaphore(64)

        async def push(session: SessionPush) -> None:
            async with slots:
                await replay.push(session)

        begin = time.perf_counter()
        await asyncio.gather(*map(push, pushes))
        took = time.perf_counter() - begin
        channel.close()
        await server.close()
        return len(pushes) / took

    return uvloop.run(main())


async def _cleared(keys: list[str]) -> int:
    return len(keys)


async def _none_missing(keys: list[str]) -> list[str]:
    return []


def take_ms(num_groups: int) -> tuple[float, float]:
    """Median time of take(4 groups), and resident bytes a key of all pushed groups."""
    buffer = make(num_groups, None)
    gc.collect()
    before = resident_bytes()
    pushes = make_pushes(buffer, num_groups)
    for push in pushes:
        buffer.push(push)
    keys = len(pushes)
    del pushes
    gc.collect()
    bytes_a_key = (resident_bytes() - before) / keys
    gc.freeze()
    times = []
    for _ in range(21):
        begin = time.perf_counter()
        assert buffer.take(4) is not None
        times.append(time.perf_counter() - begin)
    gc.unfreeze()
    return 1000 * statistics.median(times), bytes_a_key


def resident_bytes() -> int:
    """Of this process, from the kernel."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def measure(folder: Path, many_keys: int) -> list[Line]:
    few, _ = take_ms(1000 // SESSIONS)
    many, bytes_a_key = take_ms(many_keys // SESSIONS)
    return [
        Line("pushes through the library, journal on", max(pushes_per_s(2000, folder / str(i)) for i in range(3)), "/s", 20_000),
        Line("pushes through the library, no journal", max(pushes_per_s(2000, None) for _ in range(3)), "/s", 20_000),
        Line("pushes over a channel, journal on", pushes_per_s_over_a_channel(500, folder / "channel"), "/s", 2_000),
        Line("take of 32 keys, 1,000 resident", few, "ms"),
        Line(f"take of 32 keys, {many_keys:,} resident", many, "ms", max(2 * few, 1.0), floor=False),
        Line("memory of a resident key", bytes_a_key, "bytes", 1500, floor=False),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the journal is written")
    parser.add_argument("--keys", type=int, default=1_000_000, help="resident keys of the large case")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for entry in measure(Path(name), options.keys):
            print(entry.text(), flush=True)

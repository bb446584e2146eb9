"""What a call over the channel costs beside a Ray actor call, in one run: ``python -m tests.benchmarks.channel_speed``.

One Ray actor answers both with the same bytes from one event loop, to one caller, and the two ways take turns. A round trip is one call at a
time; pipelined calls are ``WINDOW`` at a time. No run of ``streamrl launch`` should go on beside it.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import ray
import uvloop

from actors.cluster import ENVIRONMENT
from actors.remote import as_future
from streamrl.protocol.channel import ChannelClient, ChannelServer

SIZES = {"100 B": 100, "50 kB": 50_000}
ROUNDS, TRIPS, WINDOW, PIPELINED = 10, 100, 64, 512

Send = Callable[[str, bytes], Awaitable[bytes]]


class Echo:
    """The same answer for a call through Ray and over the channel."""

    async def serve(self, path: str) -> None:
        self.server = ChannelServer(Path(path), self.call)
        await self.server.start()

    async def call(self, method: str, payload: bytes) -> bytes:
        return payload


class Speed(NamedTuple):
    """Of one way and one payload, over all rounds."""

    trips_s: list[float]
    calls_per_s: list[float]

    @property
    def median_us(self) -> float:
        return statistics.median(self.trips_s) * 1e6

    @property
    def p99_us(self) -> float:
        return statistics.quantiles(self.trips_s, n=100)[98] * 1e6


async def round_trips(send: Send, payload: bytes) -> list[float]:
    """Seconds of each of ``TRIPS`` calls, one after another."""
    times = []
    for _ in range(TRIPS):
        began = time.perf_counter()
        await send("echo", payload)
        times.append(time.perf_counter() - began)
    return times


async def pipelined(send: Send, payload: bytes) -> float:
    """Calls a second with ``WINDOW`` in flight."""

    async def lane() -> None:
        for _ in range(PIPELINED // WINDOW):
            await send("echo", payload)

    began = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(WINDOW)))
    return PIPELINED / (time.perf_counter() - began)


async def measure(ways: dict[str, Send], payload: bytes, rounds: int) -> dict[str, Speed]:
    speeds = {name: Speed([], []) for name in ways}
    for send in ways.values():
        await pipelined(send, payload)  # warm
    for _ in range(rounds):
        for name, send in ways.items():
            speeds[name].trips_s.extend(await round_trips(send, payload))
            speeds[name].calls_per_s.append(await pipelined(send, payload))
    return speeds


async def table(path: Path) -> list[str]:
    actor = ray.remote(Echo).options(num_cpus=0).remote()
    await as_future(actor.serve.remote(str(path)))
    client = ChannelClient(path, "echo", limit_s=60)

    async def through_ray(method: str, payload: bytes) -> bytes:
        return await as_future(actor.call.remote(method, payload))

    lines = [f"{'':22}{'median':>10}{'p99':>12}{'pipelined':>18}"]
    for size, num_bytes in SIZES.items():
        speeds = await measure({"channel": client.send, "Ray": through_ray}, bytes(num_bytes), ROUNDS)
        for name, speed in speeds.items():
            rate = statistics.median(speed.calls_per_s)
            lines.append(f"{size:>8}  {name:<12}{speed.median_us:7.0f} µs{speed.p99_us:9.0f} µs{rate:10,.0f} calls/s")
        ours, theirs = speeds["channel"], speeds["Ray"]
        rates = statistics.median(ours.calls_per_s) / statistics.median(theirs.calls_per_s)
        lines.append(f"{size:>8}  {'times faster':<12}{theirs.median_us / ours.median_us:7.1f}{theirs.p99_us / ours.p99_us:12.1f}{rates:13.1f}")
    client.close()
    return lines


def main() -> None:
    ray.init(address="local", include_dashboard=False, log_to_driver=False, configure_logging=False, runtime_env={"env_vars": ENVIRONMENT})
    try:
        with tempfile.TemporaryDirectory() as folder:
            print("\n".join(uvloop.run(table(Path(folder) / "echo.sock"))))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()

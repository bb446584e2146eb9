"""A store in one process: an index and as many clients as a test likes, in a folder of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from streamrl.config.rollout import DataplaneConfig
from streamrl.dataplane import IndexCalls, Store, StoreIndex
from streamrl.protocol.channel import BlockingChannel, ChannelServer
from streamrl.protocol.keys import TrajectoryKey
from streamrl.protocol.rpc import Service, connect
from streamrl.protocol.trajectory import Trajectory

SMALL = {"capacity_bytes": 1 << 20, "segment_bytes": 64 << 10, "put_timeout_s": 0.2}


def config(**changes: Any) -> DataplaneConfig:
    return DataplaneConfig(**(SMALL | changes))


@contextmanager
def one_store(tmp_path: Path, **changes: Any) -> Iterator[tuple[Store, StoreIndex]]:
    index = StoreIndex(tmp_path, "test", config(**changes), os.getpid())
    try:
        yield Store(index, writer="w", folder=index.path, config=config(**changes)), index
    finally:
        index.close()


@contextmanager
def store_in_thread(tmp_path: Path, **changes: Any) -> Iterator[tuple[Store, StoreIndex]]:
    """A store whose plain verbs run in their caller's thread; index and async verbs are on the loop of another."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    index = StoreIndex(tmp_path, "test", config(**changes), os.getpid())
    service = Service(IndexCalls, index)
    server = ChannelServer(tmp_path / "sockets" / "store.sock", service.handle, service.handle_at_once)
    asyncio.run_coroutine_threadsafe(server.start(), loop).result()
    channel = BlockingChannel(server.path, "store", 10.0)
    try:
        direct = connect(IndexCalls, channel.send)
        yield Store(index, writer="w", folder=index.path, config=config(**changes), loop=loop, direct=direct), index
    finally:
        channel.close()
        asyncio.run_coroutine_threadsafe(server.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        index.close()


def trajectory(uid: str = "a", session_id: int = 0, tokens: int = 3, **changes: Any) -> Trajectory:
    values: dict[str, Any] = {
        "key": TrajectoryKey(uid, session_id, 0),
        "prompt_ids": [5, 6],
        "response_ids": list(range(tokens)),
        "response_mask": [1] * tokens,
        "response_logprobs": [-0.5] * tokens,
        "rollout_versions": [4] * tokens,
        "reward": 1.0,
        "num_turns": 2,
        "stop_reason": "eos",
        "reward_extra": {"acc": 1, "detail": None},
        "row": {"data_source": "math", "raw_prompt": [{"role": "user", "content": "1+1"}], "extra_info": None},
    }
    return Trajectory(**(values | changes))

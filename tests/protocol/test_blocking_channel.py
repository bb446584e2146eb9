"""Calls over a Unix socket from threads without an event loop, with lost connections and dead servers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from streamrl.errors import ActorDied, Closed, ProtocolError, StreamrlError, WaitTimeout
from streamrl.protocol.channel import BlockingChannel, ChannelServer, blocking, frames
from tests.protocol.desk import Desk, until, with_desk


@pytest.fixture
def served(tmp_path):
    """Runs a test, which calls from other threads, against a server."""
    return lambda test: asyncio.run(with_desk(tmp_path, test))


def call(channel: BlockingChannel, method: str, payload: bytes = b"") -> asyncio.Future[bytes]:
    return asyncio.ensure_future(asyncio.to_thread(channel.call, method, payload))


def test_answers_of_any_size_find_their_calls_and_each_request_has_an_id_of_its_own(served):
    async def test(path, server, desk):
        channel = BlockingChannel(path, "desk", 10)
        payloads = [os.urandom(size) for size in (0, 1, 100, 50_000, 3_000_000)]
        for payload in payloads:
            assert await call(channel, "echo", payload) == b"echo:" + payload
        assert desk.ids == [f"{channel.id}:{number}" for number in range(1, 6)]
        channel.close()

    served(test)


def test_send_never_suspends_and_does_what_call_does(served):
    async def test(path, server, desk):
        channel = BlockingChannel(path, "desk", 5)

        def step() -> Any:
            with pytest.raises(StopIteration) as end:
                channel.send("echo", b"1").send(None)
            return end.value.value

        assert await asyncio.to_thread(step) == b"echo:1"
        channel.close()

    served(test)


def test_calls_of_several_threads_take_turns(served):
    async def test(path, server, desk):
        channel = BlockingChannel(path, "desk", 10)
        with ThreadPoolExecutor(8) as threads:
            names = [b"%d" % number for number in range(200)]
            loop = asyncio.get_running_loop()
            answers = await asyncio.gather(*(loop.run_in_executor(threads, channel.call, "echo", name) for name in names))
        assert answers == [b"echo:" + name for name in names] and max(desk.executed.values()) == 1
        channel.close()

    served(test)


def test_a_failure_below_the_service_reaches_the_caller_and_the_connection_stays(served, caplog):
    async def test(path, server, desk):
        channel = BlockingChannel(path, "desk", 5)
        with pytest.raises(StreamrlError, match="fails of desk was not answered: KeyError"):
            await call(channel, "fails")
        assert await call(channel, "echo") == b"echo:"
        channel.close()
        with pytest.raises(Closed):
            await call(channel, "echo")

    served(test)


def test_what_is_too_large_is_refused_on_either_side(served, monkeypatch):
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 1000)

    async def test(path, server, desk):
        channel = BlockingChannel(path, "desk", 5)
        with pytest.raises(ProtocolError, match="at most 1000 bytes"):
            await call(channel, "echo", bytes(1000))
        monkeypatch.setattr(blocking, "MAX_FRAME_BYTES", 100)
        with pytest.raises(ProtocolError, match=r"echo of desk.*at most 100 bytes"):
            await call(channel, "echo", bytes(200))
        assert await call(channel, "echo") == b"echo:"
        channel.close()

    served(test)


def test_a_call_without_an_answer_ends_at_its_limit_and_its_late_answer_is_nobodys(served):
    async def test(path, server, desk):
        channel = BlockingChannel(path, "desk", 0.1)
        with pytest.raises(WaitTimeout, match=r"wait of desk must be answered within 0\.1 s"):
            await call(channel, "wait")
        desk.door.set()
        assert await call(channel, "echo", b"x") == b"echo:x"
        channel.close()

    served(test)


def test_a_turn_that_does_not_come_ends_a_call_too(served):
    async def test(path, server, desk):
        channel = BlockingChannel(path, "desk", 0.2)
        first = call(channel, "wait")
        await until(lambda: desk.executed)
        with pytest.raises(WaitTimeout, match="no turn"):
            await asyncio.to_thread(_with_limit(channel, 0.05))
        desk.door.set()
        assert await first == b"wait:"
        channel.close()

    served(test)


def _with_limit(channel: BlockingChannel, limit_s: float) -> Callable[[], bytes]:
    channel._limit_s = limit_s
    return lambda: channel.call("echo", b"")


def test_a_request_whose_connection_is_lost_is_executed_once_and_answered_on_the_next(served):
    async def test(path, server, desk):
        channel = BlockingChannel(path, "desk", 10)
        waiting = call(channel, "wait", b"w")
        for _ in range(3):
            await until(lambda: desk.executed and server._connections)
            for connection in list(server._connections):
                connection.transport.abort()
            await until(lambda: server._connections)
        desk.door.set()
        assert await waiting == b"wait:w" and desk.executed == {b"w": 1}
        for connection in list(server._connections):
            connection.transport.abort()
        assert await call(channel, "echo", b"after") == b"echo:after" and desk.executed[b"after"] == 1
        channel.close()

    served(test)


def test_a_peer_without_patience_is_dead_at_once_and_another_in_its_place_is_not_it(served):
    async def test(path, server, desk):
        channel = BlockingChannel(path, "desk", 10)
        waiting = call(channel, "wait")
        await until(lambda: desk.executed)
        began = time.monotonic()
        await server.close()
        with pytest.raises(ActorDied, match="wait of desk was not answered: its process has died"):
            await waiting
        assert time.monotonic() - began < 1
        other = Desk()
        successor = ChannelServer(path, other.handle)
        await successor.start()
        with pytest.raises(ActorDied, match="another one listens"):
            await call(channel, "echo")
        assert not other.executed
        channel.close()
        await successor.close()

    served(test)


def test_with_patience_a_request_goes_to_the_successor_under_the_same_id(served):
    async def test(path, server, desk):
        channel = BlockingChannel(path, "desk", 10, patience_s=5)
        waiting = call(channel, "wait", b"a")
        await until(lambda: desk.executed)
        await server.close()
        await asyncio.sleep(0.05)
        other = Desk()
        other.door.set()
        successor = ChannelServer(path, other.handle)
        await successor.start()
        assert await waiting == b"wait:a" and desk.ids == other.ids
        channel.close()
        await successor.close()

    served(test)


def test_a_peer_that_does_not_come_back_is_dead_after_the_patience_or_the_limit_of_the_call(tmp_path):
    for limit_s, patience_s in ((10, 0.1), (0.1, 10)):
        channel = BlockingChannel(tmp_path / "nobody.sock", "desk", limit_s, patience_s)
        began = time.monotonic()
        with pytest.raises(ActorDied, match=r"echo of desk was not answered"):
            channel.call("echo", b"")
        assert 0.09 <= time.monotonic() - began < 1
        channel.close()


def test_a_peer_that_listens_and_says_nothing_is_late_and_not_dead(tmp_path):
    listener = blocking.sockets.listen(tmp_path / "silent.sock")
    channel = BlockingChannel(tmp_path / "silent.sock", "silent", 0.1)
    with pytest.raises(WaitTimeout, match="echo of silent"):
        channel.call("echo", b"")
    channel.close()
    blocking.sockets.closed(listener.fileno())
    listener.close()

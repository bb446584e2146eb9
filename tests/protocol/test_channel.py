"""Calls over a Unix socket, on both event loops, with lost connections and dead servers."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from typing import Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamrl.errors import ActorDied, Closed, LeaseExpired, ProtocolError, StreamrlError, WaitTimeout
from streamrl.protocol.channel import ChannelClient, ChannelServer, frames
from streamrl.protocol.channel.frames import Request
from streamrl.protocol.request import current_request
from streamrl.protocol.rpc import Service, at_once, connect
from tests.protocol.desk import LOOPS, Desk, Stranger, until, with_desk


@pytest.fixture(params=LOOPS.values(), ids=LOOPS)
def served(request, tmp_path):
    """Runs a test against a server."""
    return lambda test: request.param(with_desk(tmp_path, test))


# ---- calls


class Greeter(Protocol):
    async def greet(self, name: str) -> str: ...
    async def refuse(self, lease_id: int) -> None: ...


class Polite:
    @at_once
    async def greet(self, name: str) -> str:
        return f"hello {name}"

    async def refuse(self, lease_id: int) -> None:
        raise LeaseExpired(f"lease {lease_id} is gone")


def test_typed_calls_and_their_errors_travel(tmp_path):
    async def main() -> None:
        service = Service(Greeter, Polite())
        server = ChannelServer(tmp_path / "greeter.sock", service.handle, service.handle_at_once)
        await server.start()
        client = ChannelClient(server.path, "greeter", 5)
        greeter = connect(Greeter, client.send)
        assert await greeter.greet("Ada") == "hello Ada"
        with pytest.raises(LeaseExpired, match="lease 7 is gone"):
            await greeter.refuse(7)
        client.close()
        await server.close()

    asyncio.run(main())


def test_a_waiting_call_blocks_no_other_and_answers_find_their_calls(served):
    async def test(path, server, desk):
        client = ChannelClient(path, "desk", 10)
        waiting = asyncio.create_task(client.send("wait", b"w"))
        payloads = [os.urandom(size) for size in (0, 1, 100, 50_000, 3_000_000)]
        answers = await asyncio.gather(*(client.send("echo", payload) for payload in payloads))
        assert answers == [b"echo:" + payload for payload in payloads]
        assert await client.send("nothing", b"") == b"" and not waiting.done()
        desk.door.set()
        assert await waiting == b"wait:w"
        client.close()

    served(test)


def test_each_request_has_an_id_of_its_own_and_code_outside_has_none(served):
    async def test(path, server, desk):
        clients = [ChannelClient(path, "desk", 5) for _ in range(2)]
        for client in clients:
            await asyncio.gather(client.send("a", b""), client.send("b", b""))
            client.close()
        assert desk.ids == [f"{client.id}:{number}" for client in clients for number in (1, 2)]
        assert current_request() is None

    served(test)


def test_a_failure_below_the_service_reaches_the_caller(served, caplog):
    async def test(path, server, desk):
        client = ChannelClient(path, "desk", 5)
        with pytest.raises(StreamrlError, match="fails of desk was not answered: KeyError"):
            await client.send("fails", b"")
        with pytest.raises(StreamrlError, match="CancelledError"):
            await client.send("cancelled", b"")
        with pytest.raises(ProtocolError, match="1 to 64 characters"):
            await client.send("m" * 65, b"")
        assert await client.send("echo", b"") == b"echo:"
        client.close()
        with pytest.raises(Closed):
            await client.send("echo", b"")

    served(test)


def test_what_is_too_large_is_refused_on_either_side_and_the_connection_stays(served, monkeypatch):
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 1000)

    async def test(path, server, desk):
        client = ChannelClient(path, "desk", 5)
        with pytest.raises(ProtocolError, match="at most 1000 bytes"):
            await client.send("echo", bytes(1000))
        with pytest.raises(ProtocolError, match=r"twice of desk.*at most 1000 bytes"):
            await client.send("twice", bytes(600))  # fits; its answer does not
        assert await client.send("echo", b"") == b"echo:" and server.malformed == 0
        client.close()

    served(test)


def test_cancelling_a_call_leaves_the_connection_and_the_other_calls_alone(served):
    async def test(path, server, desk):
        client = ChannelClient(path, "desk", 10)
        kept, dropped = (asyncio.create_task(client.send("wait", name)) for name in (b"kept", b"dropped"))
        await until(lambda: len(desk.executed) == 2)
        dropped.cancel()
        assert await client.send("echo", b"x") == b"echo:x"
        desk.door.set()
        assert await kept == b"wait:kept"
        assert dropped.cancelled() and desk.executed == {b"kept": 1, b"dropped": 1, b"x": 1}
        client.close()

    served(test)


def test_a_call_without_an_answer_ends_at_its_limit_naming_what_and_who(served):
    async def test(path, server, desk):
        client = ChannelClient(path, "desk", 0.05)
        with pytest.raises(WaitTimeout, match=r"wait of desk must be answered within 0\.05 s"):
            await client.send("wait", b"")
        client.close()

    served(test)


# ---- the socket


def test_the_socket_is_the_users_alone_and_its_folder_may_have_a_long_name(tmp_path):
    async def main() -> None:
        path = tmp_path / ("long-" * 30) / ("run-" * 30) / "sockets" / "replay.sock"
        path.parent.parent.mkdir(parents=True)
        server = ChannelServer(path, Desk().handle)
        await server.start()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        client = ChannelClient(path, "replay", 5)
        assert await client.send("echo", b"1") == b"echo:1"
        client.close()
        await server.close()
        assert list(path.parent.iterdir()) == []

    asyncio.run(main())


def test_a_successor_replaces_the_socket_and_its_predecessors_end_does_not_remove_it(served):
    async def test(path, server, desk):
        successor = ChannelServer(path, Desk().handle)
        await successor.start()
        await server.close()
        client = ChannelClient(path, "desk", 5)
        assert await client.send("echo", b"") == b"echo:"
        client.close()
        await successor.close()
        assert not path.exists()

    served(test)


# ---- lost connections, one server


def test_a_request_that_runs_while_its_connection_is_lost_is_executed_once_and_answered_on_the_next(served):
    async def test(path, server, desk):
        client = ChannelClient(path, "desk", 10)
        call = asyncio.create_task(client.send("wait", b"w"))
        for _ in range(3):
            await until(lambda: client._link is not None and desk.executed)
            client._link.transport.abort()
            await until(lambda: client._link is None)
        await until(lambda: client._link is not None)
        desk.door.set()
        assert await call == b"wait:w" and desk.executed == {b"w": 1}
        client.close()

    served(test)


def test_an_answer_that_was_lost_is_sent_again_until_the_client_says_it_has_it(served):
    async def test(path, server, desk):
        first = await Stranger.meet(path, "client-1")
        first.say(Request(1, [], "echo", b"once"))
        await until(lambda: desk.executed[b"once"])
        await first.leave()
        for _ in range(2):
            again = await Stranger.meet(path, "client-1", (1,))
            again.say(Request(1, [], "echo", b"once"))
            assert await again.hear() == [1, b"echo:once", None]
            await again.leave()
        assert desk.executed == {b"once": 1}
        assert server._sessions["client-1"]._answers.keys() == {1}
        last = await Stranger.meet(path, "client-1", ())
        assert not server._sessions["client-1"]._answers
        last.say(Request(2, [], "echo", b"a"))
        await last.hear()
        last.say(Request(3, [2], "echo", b"b"))
        await last.hear()
        assert server._sessions["client-1"]._answers.keys() == {3}
        await last.leave()

    served(test)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.sampled_from(["call", "wait", "lose", "lose at the server", "turn", "cancel"]), min_size=1, max_size=30))
def test_whatever_is_lost_and_when_every_request_is_executed_once_and_answered(tmp_path, steps):
    async def main() -> None:
        desk = Desk()
        server = ChannelServer(tmp_path / "desk.sock", desk.handle)
        await server.start()
        client = ChannelClient(server.path, "desk", 5)
        calls: dict[bytes, asyncio.Task[bytes]] = {}
        for number, step in enumerate(steps):
            if step in ("call", "wait"):
                calls[b"%d" % number] = asyncio.create_task(client.send(step, b"%d" % number))
            elif step == "lose" and client._link is not None:
                client._link.transport.abort()
            elif step == "lose at the server":
                for connection in list(server._connections):
                    connection.transport.abort()
            elif step == "cancel" and calls:
                calls.pop(next(iter(calls))).cancel()
            await asyncio.sleep(0)
            if step == "turn":
                await asyncio.sleep(0.001)
        asyncio.get_running_loop().call_later(0.01, desk.door.set)
        for name, call in calls.items():
            assert (await call).partition(b":")[2] == name and desk.executed[name] == 1
        assert max(desk.executed.values(), default=1) == 1
        client.close()
        await server.close()

    asyncio.run(main())


# ---- dead servers


def test_a_peer_without_patience_is_dead_at_once_and_another_in_its_place_is_not_it(served):
    async def test(path, server, desk):
        client = ChannelClient(path, "desk", 10)
        call = asyncio.create_task(client.send("wait", b""))
        await until(lambda: desk.executed)
        began = time.monotonic()
        await server.close()
        with pytest.raises(ActorDied, match="wait of desk was not answered: its process has died"):
            await call
        assert time.monotonic() - began < 1
        successor = ChannelServer(path, Desk().handle)
        await successor.start()
        with pytest.raises(ActorDied):
            await client.send("echo", b"")
        client.close()
        await successor.close()

    served(test)


def test_a_silent_client_without_patience_does_not_talk_to_the_successor(served):
    async def test(path, server, desk):
        client = ChannelClient(path, "desk", 10)
        await client.send("echo", b"")
        await server.close()
        other = Desk()
        successor = ChannelServer(path, other.handle)
        await successor.start()
        with pytest.raises(ActorDied, match="another one listens"):
            await client.send("echo", b"")
        assert not other.executed
        await successor.close()

    served(test)


def test_with_patience_requests_go_to_the_successor_under_the_same_ids(served):
    async def test(path, server, desk):
        client = ChannelClient(path, "desk", 10, patience_s=5)
        calls = [asyncio.create_task(client.send("wait", name)) for name in (b"a", b"b")]
        await until(lambda: len(desk.executed) == 2)
        await server.close()
        late = asyncio.create_task(client.send("echo", b"c"))
        await asyncio.sleep(0.05)
        other = Desk()
        other.door.set()
        successor = ChannelServer(path, other.handle)
        await successor.start()
        assert await asyncio.gather(*calls, late) == [b"wait:a", b"wait:b", b"echo:c"]
        assert desk.ids == other.ids[:2] and len(set(other.ids)) == 3
        client.close()
        await successor.close()

    served(test)


def test_a_peer_that_does_not_come_back_is_dead_after_the_patience_or_the_limit_of_the_call(served):
    async def test(path, server, desk):
        await server.close()
        for limit_s, patience_s in ((10, 0.1), (0.1, 10)):
            client = ChannelClient(path, "desk", limit_s, patience_s)
            began = time.monotonic()
            with pytest.raises(ActorDied, match=r"echo of desk was not answered"):
                await client.send("echo", b"")
            assert 0.09 <= time.monotonic() - began < 1
            client.close()

    served(test)


def test_a_peer_that_listens_and_says_nothing_is_late_and_not_dead(tmp_path):
    async def main() -> None:
        async def silent(reader, writer) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_unix_server(silent, tmp_path / "silent.sock")
        client = ChannelClient(tmp_path / "silent.sock", "silent", 0.1)
        with pytest.raises(WaitTimeout, match="echo of silent"):
            await client.send("echo", b"")
        client.close()
        await asyncio.sleep(0.01)
        server.close()

    asyncio.run(main())


FORKS = """
import asyncio, os, sys, time
from pathlib import Path
from streamrl.protocol.channel import ChannelServer

async def handle(method, payload):
    if os.fork() == 0:
        time.sleep(3)
        os._exit(0)
    await asyncio.sleep(60)

async def main():
    await ChannelServer(Path(sys.argv[1]), handle).start()
    print("ready", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_killed_process_is_noticed_at_once_even_if_a_forked_child_of_it_lives(tmp_path):
    path = tmp_path / "desk.sock"
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", FORKS, str(path)], stdout=subprocess.PIPE, text=True)

    async def main() -> None:
        client = ChannelClient(path, "desk", 10)
        call = asyncio.create_task(client.send("fork", b""))
        await asyncio.sleep(0.3)
        assert not call.done()
        os.kill(process.pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(ActorDied):
            await call
        assert time.monotonic() - began < 1
        client.close()

    try:
        assert process.stdout.readline() == "ready\n"
        asyncio.run(main())
    finally:
        process.kill()
        process.stdout.close()
        process.wait()

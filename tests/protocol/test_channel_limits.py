"""What a channel does not let in: too much, too large, malformed. The server and its other clients go on."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamrl.protocol.channel import ChannelClient, ChannelServer, sessions
from streamrl.protocol.channel.frames import MAGIC, MAX_FRAME_BYTES, Hello, Reply, Request, frame
from tests.protocol.desk import LOOPS, Desk, Stranger, until, with_desk


@pytest.fixture(params=LOOPS.values(), ids=LOOPS)
def served(request, tmp_path):
    """Runs a test against a server."""
    return lambda test: request.param(with_desk(tmp_path, test))


def test_above_the_limit_of_open_requests_a_connection_is_not_read(served):
    async def test(path, server, desk):
        many, more = sessions.MAX_OPEN, 50
        stranger, other = await Stranger.meet(path, "client-1"), ChannelClient(path, "desk", 5)
        stranger.say(*(Request(number, [], "wait", b"%d" % number) for number in range(1, many + more + 1)))
        await until(lambda: len(desk.executed) >= many)
        await asyncio.sleep(0.05)
        assert len(desk.executed) == many
        assert await other.send("echo", b"free") == b"echo:free"
        desk.door.set()
        assert sorted([(await stranger.hear())[0] for _ in range(many + more)]) == list(range(1, many + more + 1))
        await stranger.leave()
        other.close()

    served(test)


def test_a_client_that_does_not_read_its_answers_is_not_read_either(served):
    async def test(path, server, desk):
        stranger = await Stranger.meet(path, "client-1")
        for number in range(1, 101):
            stranger.say(Request(number, [], "echo", bytes(100_000)))
        await asyncio.sleep(0.3)
        assert desk.executed[bytes(100_000)] < 50
        assert [(await stranger.hear())[0] for _ in range(100)] == list(range(1, 101))
        await stranger.leave()

    served(test)


def test_the_memory_for_answers_is_bounded_and_what_had_to_go_is_refused_not_executed_again():
    session, large = sessions.Session(), bytes(sessions.MAX_KEPT_BYTES // 3)
    sent: list[bytes] = []
    session._write = sent.append
    for number in range(1, 5):
        session.answer(number, large)
    assert session._kept_bytes <= sessions.MAX_KEPT_BYTES
    assert session.repeats(4) and sent[-1] is large
    assert session.repeats(1) and b"which had to go" in sent[-1]
    assert not session.repeats(5)
    for number in range(5, sessions.MAX_KEPT + 100):
        session.answer(number, b"small")
    assert len(session._answers) == sessions.MAX_KEPT
    session.done(list(range(sessions.MAX_KEPT + 100)))
    assert session._kept_bytes == 0 and not session._answers


BROKEN = {
    "no hello": frame(Request(1, [], "echo", b"")),
    "another hello": frame(Hello("streamrl-channel-1", "short")),
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no msgpack": b"\x01\x00\x00\x00\xc1",
    "an empty frame": bytes(4),
    "a giant": (MAX_FRAME_BYTES + 1).to_bytes(4, "little"),
    "a number below one": frame(Hello(MAGIC, "client-1")) + frame(Request(0, [], "echo", b"")),
    "a long method": frame(Hello(MAGIC, "client-1")) + frame(Request(1, [], "m" * 65, b"")),
    "a reply": frame(Hello(MAGIC, "client-1")) + frame(Reply(1, b"")),
    "nested deeply": frame(Hello(MAGIC, "client-1")) + (50_000).to_bytes(4, "little") + b"\x91" * 50_000,
    "no utf-8": frame(Hello(MAGIC, "client-1")) + b"\x07\x00\x00\x00\x94\x01\x90\xa1\xff\xc4\x00",
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_a_malformed_frame_closes_its_connection_only_and_is_counted(served, data):
    async def test(path, server, desk):
        client = ChannelClient(path, "desk", 5)
        waiting = asyncio.create_task(client.send("wait", b"w"))
        await until(lambda: desk.executed)
        stranger = await Stranger.meet(path)
        stranger.writer.write(data + b"more of it")
        while answer := await stranger.reader.read(1 << 16):  # until the end
            assert b"streamrl-channel-1" in answer or b"refused a message" in answer
        stranger.writer.close()
        assert server.malformed == 1 and desk.executed == {b"w": 1}
        desk.door.set()
        assert await waiting == b"wait:w"
        client.close()

    served(test)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.just(bytes(frame(Hello(MAGIC, "client-1", [3])))),
            st.binary(max_size=60).map(lambda body: len(body).to_bytes(4, "little") + body),
            st.builds(
                lambda n, done, method: bytes(frame(Request(n, done, method, b"x"))), st.integers(0, 9), st.lists(st.integers(-1, 9)), st.text(max_size=70)
            ),
        ),
        max_size=8,
    )
)
def test_no_bytes_of_a_stranger_stop_the_server(tmp_path, pieces):
    async def main() -> None:
        desk = Desk()
        desk.door.set()
        server = ChannelServer(tmp_path / "desk.sock", desk.handle)
        await server.start()
        client = ChannelClient(server.path, "desk", 5)
        before = asyncio.create_task(client.send("echo", b"before"))
        stranger = await Stranger.meet(server.path)
        for piece in pieces:
            stranger.writer.write(piece)
            await asyncio.sleep(0)
        stranger.writer.close()
        assert await client.send("echo", b"after") == b"echo:after" and await before == b"echo:before"
        client.close()
        await server.close()

    asyncio.run(main())

"""A server for the tests of the channel, and a peer that writes its frames by hand."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from streamrl.protocol.channel import ChannelServer
from streamrl.protocol.channel.frames import MAGIC, Hello, Request, frame
from streamrl.protocol.request import current_request

LOOPS = {"asyncio": asyncio.run, "uvloop": uvloop.run}


class Desk:
    """A handle for tests: counts executions, keeps the ids it saw, and lets ``wait`` hang until the door opens."""

    def __init__(self) -> None:
        self.executed: Counter[bytes] = Counter()
        self.ids: list[str | None] = []
        self.door = asyncio.Event()

    async def handle(self, method: str, payload: bytes) -> bytes:
        self.executed[payload] += 1
        self.ids.append(current_request())
        if method == "wait":
            await self.door.wait()
        if method == "cancelled":
            raise asyncio.CancelledError
        if method == "fails":
            raise KeyError("a bug below the service")
        if method == "twice":
            return payload + payload
        return b"" if method == "nothing" else method.encode() + b":" + payload


class Stranger:
    """A peer that writes frames by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def meet(cls, path: Path, client: str | None = None, numbers: tuple[int, ...] = ()) -> Stranger:
        self = cls(*await asyncio.open_unix_connection(path))
        if client is not None:
            self.say(Hello(MAGIC, client, list(numbers)))
            msgspec.convert(await self.hear(), Hello)
        return self

    def say(self, *messages: Hello | Request) -> None:
        self.writer.write(b"".join(map(frame, messages)))

    async def hear(self) -> list:
        size = int.from_bytes(await self.reader.readexactly(4), "little")
        return msgspec.msgpack.decode(await self.reader.readexactly(size))

    async def leave(self) -> None:
        self.writer.transport.abort()
        await asyncio.sleep(0.01)


async def with_desk(folder: Path, test: Callable[[Path, ChannelServer, Desk], Awaitable[Any]]) -> None:
    """Run ``test`` against a server that ends with it."""
    desk = Desk()
    server = ChannelServer(folder / "sockets" / "desk.sock", desk.handle)
    await server.start()
    try:
        await asyncio.wait_for(test(server.path, server, desk), 20)
    finally:
        await server.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)

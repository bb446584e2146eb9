"""The serving end of a channel: runs every request as a task of its own, so that a waiting one blocks no other; one that never waits needs none.

What runs goes on when its client is lost, and is not started again when the client comes back. Frames that break a rule close their connection
and count in ``malformed``. Knows nothing of methods and payloads: ``handle`` does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

from streamrl.errors import to_wire
from streamrl.protocol.channel import sockets
from streamrl.protocol.channel.frames import HELLO, MAGIC, REQUEST, Connection, Hello, Reply, Request, frame
from streamrl.protocol.channel.sessions import Session
from streamrl.protocol.request import enter_request

log = logging.getLogger(__name__)

Handle = Callable[[str, bytes], Awaitable[bytes]]
HandleAtOnce = Callable[[str, bytes], bytes | None]  # None: ask ``Handle``
MAX_LOST_CLIENTS = 64  # remembered without a connection; a live client comes back at once, so older ones are dead


class ChannelServer:
    """Answers at ``path`` from ``handle``. A socket that lies there is replaced: only one process may serve a name, which its owner sees to."""

    def __init__(self, path: Path, handle: Handle, at_once: HandleAtOnce = lambda method, payload: None) -> None:
        self.path = path
        self.life = secrets.token_hex(8)
        self.malformed = 0  # connections closed for what they sent
        self._handle = handle
        self._at_once = at_once
        self._sessions: dict[str, Session] = {}
        self._connections: set[_Served] = set()
        self._server: asyncio.Server | None = None
        self._listener = -1
        self._inode = 0

    async def start(self) -> None:
        """Listen. OSError where a socket cannot be made."""
        listener = sockets.listen(self.path)
        self._listener, self._inode = listener.fileno(), os.stat(self.path).st_ino
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: _Served(self), sock=listener, backlog=sockets.BACKLOG)

    async def close(self) -> None:
        """Stop listening, drop all connections, cancel what runs. Idempotent."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        sockets.closed(self._listener)
        if self.path.exists() and os.stat(self.path).st_ino == self._inode:  # a successor's is not ours
            self.path.unlink()
        for connection in list(self._connections):
            connection.transport.abort()
        tasks = [task for session in self._sessions.values() for task in session.running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()

    # ---- connections

    def opened(self, connection: _Served) -> None:
        self._connections.add(connection)

    def joined(self, client: str, connection: _Served, numbers: list[int]) -> Session:
        """The session of a client, which may have had it before."""
        session = self._sessions.pop(client, None) or Session()
        self._sessions[client] = session  # newest last
        session.join(connection, numbers)
        lost = [name for name, session in self._sessions.items() if session.connection is None and not session.running]
        for name in lost[: max(0, len(lost) - MAX_LOST_CLIENTS)]:
            del self._sessions[name]
        return session

    def refused(self, connection: _Served, error: Exception) -> None:
        self.malformed += 1
        log.warning("a connection to %s is closed for what it sent: %s", self.path.name, error)
        connection.write(frame(Reply(0, None, ("ProtocolError", f"the channel {self.path.name} refused a message: {error}", ""))))
        connection.close()

    def gone(self, connection: _Served) -> None:
        self._connections.discard(connection)

    # ---- requests

    def request(self, client: str, session: Session, request: Request) -> None:
        session.done(request.done)
        if session.repeats(request.number):
            return
        reply = self._at_once(request.method, request.payload)
        if reply is not None:
            session.answer(request.number, frame(Reply(request.number, reply)))
        else:
            session.started(request.number, asyncio.get_running_loop().create_task(self._answer(client, session, request)))

    async def _answer(self, client: str, session: Session, request: Request) -> None:
        enter_request(client, request.number)
        try:
            session.answer(request.number, frame(Reply(request.number, await self._handle(request.method, request.payload))))
        except (Exception, asyncio.CancelledError) as error:
            if self._server is None:
                raise  # closing: the caller sees its connection end
            log.exception("%s was not answered", request.method)
            session.answer(request.number, frame(Reply(request.number, None, to_wire(error))))
        finally:
            session.ended(request.number)


class _Served(Connection):
    """The server's end of one connection."""

    def __init__(self, server: ChannelServer) -> None:
        super().__init__()
        self._server = server
        self._client = ""
        self._session: Session | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.opened(self)

    def received(self, view: memoryview) -> None:
        if self._session is None:
            hello = HELLO.decode(view)
            self.write(frame(Hello(MAGIC, self._server.life)))
            self._client, self._session = hello.id, self._server.joined(hello.id, self, hello.numbers)
        else:
            self._server.request(self._client, self._session, REQUEST.decode(view))

    def broken(self, error: Exception) -> None:
        self._server.refused(self, error)

    def lost(self) -> None:
        self._server.gone(self)
        if self._session is not None and self._session.connection is self:
            self._session.leave()

"""The calling end of a channel: one connection for all concurrent calls, made when it is needed and made again when it is lost.

A request keeps its id until its call ends. After a loss every request that still waits is sent again; the server, or its successor, tells a repeat
by the id. How long nobody may listen before that counts as death is ``patience_s``:

    0          (default) the peer is one process: when it is gone, or another answers in its place, calls end in ActorDied, now and ever after
    30         a peer that is restarted: calls wait for its successor up to 30 s, each at most to its own deadline

Cancelling a call leaves the connection and the execution alone; the answer is dropped. A repeat is the only thing here that is tried in intervals:
nothing tells when somebody begins to listen.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from pathlib import Path

from streamrl.errors import ActorDied, Closed, ProtocolError, StreamrlError, WaitTimeout, from_wire
from streamrl.protocol.channel import sockets
from streamrl.protocol.channel.frames import HELLO, MAGIC, MAX_METHOD_CHARS, REPLY, Connection, Hello, Reply, Request, frame

log = logging.getLogger(__name__)

FIRST_DELAY_S, LONGEST_DELAY_S = 0.01, 0.25  # between two attempts to connect; the first comes at once


class ChannelClient:
    """Calls of one process to the server at ``path``; ``name`` is the peer's, for errors. Used from one event loop."""

    def __init__(self, path: Path, name: str, limit_s: float, patience_s: float = 0.0) -> None:
        self.id = secrets.token_hex(8)
        self._path = path
        self._name = name
        self._limit_s = limit_s
        self._patience_s = patience_s
        self._last = 0  # number of the newest request
        self._open: dict[int, tuple[bytearray, asyncio.Future[bytes]]] = {}
        self._done: list[int] = []  # to be told with the next request
        self._link: _Link | None = None
        self._reaching: asyncio.Task[None] | None = None
        self._delay_s = 0.0
        self._listens = False  # whether the last attempt found somebody, who may be too busy to greet
        self._life = ""  # of the server that answered first
        self._closed = False

    async def send(self, method: str, payload: bytes) -> bytes:
        """The answer. ActorDied when nobody listens (any more), WaitTimeout when nobody answers within the limit."""
        if self._closed:
            raise Closed(f"a channel is called before it is closed, got {method} of {self._name}; keep the client open")
        if not 0 < len(method) <= MAX_METHOD_CHARS:
            raise ProtocolError(f"the name of a method has 1 to {MAX_METHOD_CHARS} characters, got {method[:80]!r}; shorten it")
        request = frame(Request(self._last + 1, self._done, method, payload))
        self._last, self._done = self._last + 1, []
        number, answer = self._last, asyncio.get_running_loop().create_future()
        self._open[number] = (request, answer)
        if self._link is not None:
            self._link.write(request)
        else:
            self._reach()
        try:
            async with asyncio.timeout(self._limit_s):
                return await answer
        except TimeoutError:
            raise self._too_late(method) from None
        except StreamrlError as error:
            raise type(error)(f"{method} of {self._name} was not answered: {error}") from None
        finally:
            del self._open[number]
            self._done.append(number)

    def close(self) -> None:
        """Calls that wait end in Closed. Idempotent."""
        self._closed = True
        self._fail(Closed("the channel was closed on this side"))
        if self._reaching is not None:
            self._reaching.cancel()
        if self._link is not None:
            self._link.close()

    def _too_late(self, method: str) -> StreamrlError:
        if not self._listens:
            return ActorDied(f"{method} of {self._name} was not answered: nobody listens at {self._path}, and none came within {self._limit_s:g} s")
        return WaitTimeout(f"{method} of {self._name} must be answered within {self._limit_s:g} s, got no answer; see the log of that actor")

    def _fail(self, error: StreamrlError) -> None:
        for _, answer in self._open.values():
            if not answer.done():
                answer.set_exception(error)

    # ---- the connection

    def _reach(self) -> None:
        if self._reaching is None:
            self._reaching = asyncio.create_task(self._connect(), name=f"connect to {self._name}")
            self._reaching.add_done_callback(self._reached)

    def _reached(self, task: asyncio.Task[None]) -> None:
        """Look at how it ended; a call may have come meanwhile."""
        self._reaching = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the channel to %s failed", self._name, exc_info=error)
            self._fail(StreamrlError(f"{type(error).__name__}: {error}"))
        elif self._open and self._link is None and not self._closed:
            self._reach()

    async def _connect(self) -> None:
        """Until there is a connection with all open requests sent, or nobody listened for ``patience_s``, or no call waits any more."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while self._open:
            await asyncio.sleep(self._delay_s)
            self._delay_s = min(max(FIRST_DELAY_S, 2 * self._delay_s), LONGEST_DELAY_S)
            try:
                link = await self._dial()
            except (BlockingIOError, ConnectionResetError):
                self._listens = True  # if it was dying just then, the next attempt tells
                continue
            except OSError as error:
                self._listens = False
                if loop.time() - began >= self._patience_s:
                    return self._give_up(f"its process has died ({error.strerror or error} at {self._path})")
                continue
            if not self._patience_s and self._life not in ("", link.life):
                link.close()
                return self._give_up(f"its process has died, and another one listens at {self._path}")
            self._life = link.life
            if link.is_open:
                self._link = link
                for request, answer in self._open.values():
                    if not answer.done():
                        link.write(request)
                return

    def _give_up(self, why: str) -> None:
        self._delay_s = 0.0
        self._fail(ActorDied(why))

    async def _dial(self) -> _Link:
        """A connection on which the server has said who it is. A hung server is waited for: the calls have deadlines."""
        link = _Link(self)
        await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=sockets.connect(self._path))
        self._listens = True
        try:
            self._done = []  # the numbers in the hello say it all
            link.write(frame(Hello(MAGIC, self.id, list(self._open))))
            link.life = await link.greeting
        except BaseException:
            link.close()
            raise
        return link

    # ---- called by the link

    def answered(self, reply: Reply) -> None:
        self._delay_s = 0.0
        error = None if reply.error is None else from_wire(*reply.error)
        if reply.number == 0:
            self._fail(error or ProtocolError("the server closed the connection"))
        elif reply.number in self._open and not (answer := self._open[reply.number][1]).done():
            answer.set_exception(error) if error is not None else answer.set_result(reply.payload or b"")

    def lost(self, link: _Link) -> None:
        if self._link is link:
            self._link = None
            if self._open and not self._closed:
                self._reach()


class _Link(Connection):
    """The client's end of one connection."""

    def __init__(self, client: ChannelClient) -> None:
        super().__init__()
        self._client = client
        self.greeting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.life = ""

    def received(self, view: memoryview) -> None:
        if not self.greeting.done():
            self.greeting.set_result(HELLO.decode(view).id)
        else:
            self._client.answered(REPLY.decode(view))

    def broken(self, error: Exception) -> None:
        log.warning("a connection is closed for what the server sent: %s", error)
        self.close()

    def lost(self) -> None:
        if not self.greeting.done():
            self.greeting.set_exception(ConnectionResetError(104, "the connection was closed before the first word"))
        self._client.lost(self)

    # A server that reads slowly holds its replies back by itself: this side goes on reading.

    def pause_writing(self) -> None:
        pass

    def resume_writing(self) -> None:
        pass

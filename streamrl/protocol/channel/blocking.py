"""The calling end of a channel for threads without an event loop: a call is written to a socket and its answer read from it by the thread that makes it.

A call that goes through a loop wakes four threads, one that does not wakes two; for small calls on a busy machine that is most of their time. Frames,
ids, repeats, ``patience_s`` and errors are those of ``client.py``. Calls of several threads take turns. Meant for calls that are answered at once:
a call that waits for room or for a condition would hold up the others, and belongs on a ChannelClient.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import struct
import threading
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from streamrl.errors import ActorDied, Closed, ProtocolError, StreamrlError, WaitTimeout, from_wire
from streamrl.protocol.channel import sockets
from streamrl.protocol.channel.client import FIRST_DELAY_S, LONGEST_DELAY_S
from streamrl.protocol.channel.frames import HELLO, MAGIC, MAX_FRAME_BYTES, REPLY, Hello, Request, frame

log = logging.getLogger(__name__)

T = TypeVar("T")

_READ_BYTES = 64 << 10
_LENGTH = struct.Struct("<I")
_LATE_SHARE = 0.02  # of the limit, that a call may end after its deadline


class BlockingChannel:
    """Calls of any thread to the server at ``path``; ``name`` is the peer's, for errors."""

    def __init__(self, path: Path, name: str, limit_s: float, patience_s: float = 0.0) -> None:
        self.id = secrets.token_hex(8)
        self._path = path
        self._name = name
        self._limit_s = limit_s
        self._patience_s = patience_s
        self._turn = threading.Lock()
        self._last = 0  # number of the newest request
        self._socket: socket.socket | None = None
        self._got = bytearray()  # read, but not yet a whole frame
        self._life = ""  # of the server that answered first
        self._closed = False

    async def send(self, method: str, payload: bytes) -> bytes:
        """As :meth:`call`, for ``rpc.connect``: a coroutine that never suspends."""
        return self.call(method, payload)

    def call(self, method: str, payload: bytes) -> bytes:
        """The answer. ActorDied when nobody listens (any more), WaitTimeout when nobody answers within the limit."""
        deadline = time.monotonic() + self._limit_s
        if not self._turn.acquire(timeout=self._limit_s):
            raise WaitTimeout(f"{method} of {self._name} must be answered within {self._limit_s:g} s, got no turn behind calls of other threads")
        try:
            if self._closed:
                raise Closed(f"a channel is called before it is closed, got {method} of {self._name}; keep the client open")
            self._last += 1
            request = frame(Request(self._last, [self._last - 1] if self._last > 1 else [], method, payload))
            return self._answer(self._last, request, deadline)
        except StreamrlError as error:
            raise type(error)(f"{method} of {self._name} was not answered: {error}") from None
        except TimeoutError:
            raise WaitTimeout(f"{method} of {self._name} must be answered within {self._limit_s:g} s, got no answer; see the log of that actor") from None
        finally:
            self._turn.release()

    def close(self) -> None:
        """A call that is being answered ends first. Idempotent."""
        with self._turn:
            self._closed = True
            self._hang_up()

    def _answer(self, number: int, request: bytearray, deadline: float) -> bytes:
        """Over as many connections as it takes. Nothing tells when somebody begins to listen, so that is tried in intervals."""
        delay_s, alone_since = 0.0, 0.0
        while True:
            try:
                if self._socket is None:
                    self._dial(number, deadline)
                    delay_s = alone_since = 0.0
                self._write(request, deadline)
                return self._read_answer(number, deadline)
            except (StreamrlError, TimeoutError):
                self._hang_up()
                raise
            except OSError as error:
                self._hang_up()
                now, gone = time.monotonic(), not isinstance(error, (BlockingIOError, ConnectionResetError, BrokenPipeError))
                alone_since = (alone_since or now) if gone else 0.0
                if gone and now - alone_since >= self._patience_s:
                    raise ActorDied(f"its process has died ({error.strerror or error} at {self._path})") from None
                if now >= deadline:
                    raise ActorDied(f"nobody listens at {self._path}, and none came within {self._limit_s:g} s") from None
                time.sleep(min(delay_s, max(0.0, deadline - now)))
                delay_s = min(max(FIRST_DELAY_S, 2 * delay_s), LONGEST_DELAY_S)
            except BaseException:
                self._hang_up()  # what the stream holds next is not known
                raise

    def _dial(self, number: int, deadline: float) -> None:
        """A connection on which the server has said who it is."""
        self._socket = sockets.connect(self._path)
        sockets.not_for_children(self._socket.fileno())
        self._write(frame(Hello(MAGIC, self.id, [number])), deadline)
        life = _decoded(HELLO, self._read(deadline)).id
        if not self._patience_s and self._life not in ("", life):
            raise ActorDied(f"its process has died, and another one listens at {self._path}")
        self._life = life

    def _write(self, data: bytearray, deadline: float) -> None:
        self._connected(deadline).sendall(data)

    def _read_answer(self, number: int, deadline: float) -> bytes:
        while True:
            reply = _decoded(REPLY, self._read(deadline))
            if reply.error is not None and reply.number in (number, 0):
                raise from_wire(*reply.error)
            if reply.number == 0:
                raise ProtocolError("the server closed the connection")
            if reply.number == number:
                return reply.payload or b""

    def _read(self, deadline: float) -> bytes:
        """The next frame."""
        got, missing = self._got, _LENGTH.size - len(self._got)
        while missing > 0:
            data = self._connected(deadline).recv(max(missing, _READ_BYTES))
            if not data:
                raise ConnectionResetError(104, "the connection was closed")
            got += data
            missing -= len(data)
            if len(got) >= _LENGTH.size:
                missing = _LENGTH.size + _size(got) - len(got)
        end = _LENGTH.size + _size(got)
        whole = bytes(memoryview(got)[_LENGTH.size : end])
        del got[:end]
        return whole

    def _connected(self, deadline: float) -> socket.socket:
        """The socket, which gives up at the deadline or a little later: setting its timeout is a system call, so one that nearly fits stays."""
        if self._socket is None:
            raise ProtocolError(f"a message goes over an open connection, got none to {self._name}; dial first")
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        set_s = self._socket.gettimeout()
        if set_s is None or not left_s <= set_s <= left_s + _LATE_SHARE * self._limit_s:
            self._socket.settimeout(left_s)
        return self._socket

    def _hang_up(self) -> None:
        self._got = bytearray()
        if self._socket is not None:
            sockets.closed(self._socket.fileno())
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None


def _size(got: bytearray) -> int:
    size = int(_LENGTH.unpack_from(got)[0])
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message has at most {MAX_FRAME_BYTES} bytes, got one of {size}; both sides must run one version")
    return size


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a server answers in frames of the channel, got {error}; both sides must run one version") from error

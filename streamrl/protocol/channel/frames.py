"""Messages of the channel, and one end of a connection that cuts them out of the stream.

    frame = length u32 (of what follows) | msgpack array

    client: Hello, then Requests         server: Hello, then Replies

    Hello(id="9f2c…", numbers=[7])              a client that comes back still waits for the answer to 7
    Request(8, [5, 6], "push", b"\\x91…")        the answers to 5 and 6 have arrived and may be forgotten
    Reply(8, b"\\x92…")                          or Reply(8, None, ("ProtocolError", "…", "")); number 0: about the connection itself

Limits: the frame, the length of a method's name. What breaks a rule raises; which connection is then closed is the owner's business.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from typing import Annotated, Literal, cast

import msgspec
from msgspec import Meta

from streamrl.errors import ProtocolError
from streamrl.protocol.channel import sockets

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 256 << 20  # a snapshot of the replay buffer at a million keys is the largest message, somewhat above 100 MB
MAX_METHOD_CHARS = 64

Number = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]


class Hello(msgspec.Struct, array_like=True):
    """First frame of either side. ``id``: of this client object, or of this life of the server. ``numbers``: requests that still wait for an answer."""

    magic: Literal["streamrl-channel-1"]
    id: Annotated[str, Meta(min_length=8, max_length=64)]
    numbers: list[Number] = []


class Request(msgspec.Struct, array_like=True):
    """``done``: numbers whose answer has arrived, or is no longer wanted."""

    number: Number
    done: list[Number]
    method: Annotated[str, Meta(min_length=1, max_length=MAX_METHOD_CHARS)]
    payload: bytes


class Reply(msgspec.Struct, array_like=True):
    """``payload`` is None when there is an ``error`` (class, message, reason). The errors of a target travel inside the payload; these are the channel's."""

    number: int
    payload: bytes | None
    error: tuple[str, str, str] | None = None


MAGIC: Literal["streamrl-channel-1"] = "streamrl-channel-1"
HELLO = msgspec.msgpack.Decoder(Hello)
REQUEST = msgspec.msgpack.Decoder(Request)
REPLY = msgspec.msgpack.Decoder(Reply)
_ENCODER = msgspec.msgpack.Encoder()
_LENGTH = struct.Struct("<I")


def frame(message: Hello | Request | Reply) -> bytearray:
    """The message with its length in front, in one buffer that nobody changes afterwards. ProtocolError above the limit."""
    buffer = bytearray(_LENGTH.size)
    _ENCODER.encode_into(message, buffer, _LENGTH.size)
    size = len(buffer) - _LENGTH.size
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message has at most {MAX_FRAME_BYTES} bytes, got {size}; send it in parts")
    _LENGTH.pack_into(buffer, 0, size)
    return buffer


class Connection(asyncio.Protocol):
    """One end. A side overrides ``received`` (one whole frame, valid during the call), ``broken`` and ``lost``."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._holds: set[str] = set()
        self._descriptor = -1
        self.transport: asyncio.Transport

    def received(self, view: memoryview) -> None:
        raise NotImplementedError

    def broken(self, error: Exception) -> None:
        """The other side broke a rule. Must end with ``close``."""
        raise NotImplementedError

    def lost(self) -> None:
        raise NotImplementedError

    @property
    def is_open(self) -> bool:
        return not self.transport.is_closing()

    def write(self, data: bytes | bytearray) -> None:
        if self.is_open:
            self.transport.write(data)

    def close(self) -> None:
        """What was written is still sent; what arrives from now on is not looked at."""
        self._holds.add("closed")
        self.transport.close()

    def hold(self, reason: str) -> None:
        """Read no more until ``release``; the other side then feels a full socket."""
        self._holds.add(reason)
        if self.is_open:
            self.transport.pause_reading()

    def release(self, reason: str) -> None:
        """Go on with what lies in the buffer. Not from inside ``received``."""
        self._holds.discard(reason)
        self._deliver()
        if not self._holds and self.is_open:
            self.transport.resume_reading()

    def _deliver(self) -> None:
        place, head = 0, _LENGTH.size
        try:
            while not self._holds and len(self._buffer) - place >= head:
                (size,) = _LENGTH.unpack_from(self._buffer, place)
                if size > MAX_FRAME_BYTES:
                    raise ProtocolError(f"a message has at most {MAX_FRAME_BYTES} bytes, got one that claims {size}; both sides must run one version")
                end = place + head + size
                if len(self._buffer) < end:
                    break
                with memoryview(self._buffer)[place + head : end] as view:
                    self.received(view)
                place = end
        except (ProtocolError, msgspec.MsgspecError, RecursionError) as error:
            self.broken(error)
        del self._buffer[:place]

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._descriptor = sockets.not_for_children(transport.get_extra_info("socket").fileno())

    def data_received(self, data: bytes) -> None:
        if "closed" not in self._holds:
            self._buffer += data
            self._deliver()

    def pause_writing(self) -> None:
        self.hold("unread replies")

    def resume_writing(self) -> None:
        self.release("unread replies")

    def connection_lost(self, error: Exception | None) -> None:
        sockets.closed(self._descriptor)
        self._holds.add("closed")
        self.lost()

"""What a server remembers of one client, over all its connections: which requests run, and the answers that it may ask for again.

Guarantees: a number is executed once; its answer goes to the connection that the client has when it is ready. Memory is bounded: an answer is kept
until the client says it has it, and at most ``MAX_KEPT_BYTES`` of them; a repeat of one that had to go is refused, not executed again.
"""

from __future__ import annotations

import asyncio

from streamrl.errors import ProtocolError, to_wire
from streamrl.protocol.channel.frames import Connection, Reply, frame

MAX_OPEN = 1024  # running requests of one client; above that its connection is not read
MAX_KEPT = 4 * MAX_OPEN  # answers; a client that says what it has got never comes near
MAX_KEPT_BYTES = 64 << 20

FULL = "open requests"


class Session:
    """One client. ``connection`` is None while it has none."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.running: dict[int, asyncio.Task[None]] = {}
        self._unwanted: set[int] = set()
        self._answers: dict[int, bytes | bytearray | None] = {}  # oldest first; None: had to go
        self._kept_bytes = 0

    def join(self, connection: Connection, numbers: list[int]) -> None:
        """The client (re)connects; it still waits for the answers to ``numbers``."""
        self.leave()
        self.connection = connection
        self.done(list((self.running.keys() | self._answers.keys()) - set(numbers)))
        self._check_full()

    def leave(self) -> None:
        """The connection is gone, or another takes its place. What runs goes on."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def done(self, numbers: list[int]) -> None:
        """These answers will not be asked for again."""
        for number in numbers:
            if number in self.running:
                self._unwanted.add(number)
            elif number in self._answers:
                self._kept_bytes -= len(self._answers.pop(number) or b"")

    def repeats(self, number: int) -> bool:
        """Whether the request is known already; if so it has been dealt with: an answer is sent now, or when it is ready."""
        if number in self.running:
            return True
        if number not in self._answers:
            return False
        answer = self._answers[number]
        if answer is None:
            error = ProtocolError(f"a repeated request finds its answer among the last {MAX_KEPT_BYTES} bytes of answers, got {number}, which had to go")
            answer = frame(Reply(number, None, to_wire(error)))
        self._write(answer)
        return True

    def started(self, number: int, task: asyncio.Task[None]) -> None:
        self.running[number] = task
        self._check_full()

    def ended(self, number: int) -> None:
        """The task is over, whether or not it had an answer."""
        del self.running[number]
        self._unwanted.discard(number)
        if len(self.running) == MAX_OPEN - 1 and self.connection is not None:
            self.connection.release(FULL)

    def answer(self, number: int, answer: bytes | bytearray) -> None:
        """Send it and keep it, unless nobody wants it any more."""
        if number in self._unwanted:
            return
        self._write(answer)
        self._answers[number] = answer
        self._kept_bytes += len(answer)
        if self._kept_bytes > MAX_KEPT_BYTES or len(self._answers) > MAX_KEPT:
            self._make_room()

    def _make_room(self) -> None:
        for number, answer in self._answers.items():
            if self._kept_bytes <= MAX_KEPT_BYTES:
                break
            self._kept_bytes -= len(answer or b"")
            self._answers[number] = None
        while len(self._answers) > MAX_KEPT:
            self._kept_bytes -= len(self._answers.pop(next(iter(self._answers))) or b"")

    def _check_full(self) -> None:
        if len(self.running) >= MAX_OPEN and self.connection is not None:
            self.connection.hold(FULL)

    def _write(self, answer: bytes | bytearray) -> None:
        if self.connection is not None:
            self.connection.write(answer)

"""Actors that are nothing but their metric pages, and servers that misbehave."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from streamrl.telemetry.metrics import Metrics
from streamrl.telemetry.targets import Target


class Actor:
    """A page of a role on a port of its own, as long as ``close`` has not been called."""

    def __init__(self, role: str, name: str) -> None:
        self.metrics = Metrics(role, name, strict=True)
        self.target = Target(role, name, "127.0.0.1", self.metrics.serve())

    def close(self) -> None:
        self.metrics.close()


@contextmanager
def actors(*names: str) -> Iterator[dict[str, Actor]]:
    """By name; the role is what stands before the dash."""
    made = {name: Actor(name.partition("-")[0], name) for name in names}
    try:
        yield made
    finally:
        with ThreadPoolExecutor() as pool:  # each takes half a second
            list(pool.map(Actor.close, made.values()))


@contextmanager
def server(answer: bytes | None, name: str = "rollout-9") -> Iterator[Target]:
    """Answers every connection with these bytes and keeps it open; None: says nothing at all."""
    listener = socket.create_server(("127.0.0.1", 0))
    taken: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                one, _ = listener.accept()
            except OSError:
                return
            taken.append(one)
            if answer is not None:
                one.recv(4096)
                one.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield Target("rollout", name, "127.0.0.1", listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for one in taken:
            one.close()
        thread.join(5)

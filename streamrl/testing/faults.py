"""Faults on order: a connection that loses, holds or breaks calls, and a clock that runs at a pace of its own.

wire = FaultyChannel(LeaseSource, service)         a peer over the real codec of ``protocol/rpc.py``, without a socket
replay = wire.peer                                 what the other side is handed
wire.cut()                                         from now on no call arrives, as when two nodes lose each other
wire.mend()                                        calls go through again; those that were lost stay lost
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from streamrl.errors import ActorDied
from streamrl.protocol import rpc
from streamrl.protocol.rpc import Service


class FaultyChannel:
    """Calls of one process to ``target``, which serves ``interface``. ``delay_s`` is added to every call."""

    def __init__(self, interface: type, target: Any, delay_s: float = 0.0) -> None:
        self._service = Service(interface, target)
        self.peer: Any = rpc.connect(interface, self._send)
        self.delay_s = delay_s
        self.lost = 0  # calls that never arrived
        self._is_cut = self._is_dead = False

    def cut(self) -> None:
        """Packets go nowhere: calls hang."""
        self._is_cut = True

    def mend(self) -> None:
        self._is_cut = False

    def kill(self) -> None:
        """The peer's process is gone: calls end in ActorDied."""
        self._is_dead = True

    async def _send(self, method: str, payload: bytes) -> bytes:
        if self._is_dead:
            raise ActorDied(f"{method} was not answered: its process has died")
        if self._is_cut:
            self.lost += 1
            await asyncio.Event().wait()
        await asyncio.sleep(self.delay_s)
        return await self._service.handle(method, payload)


class PacedClock:
    """A monotonic clock that goes ``rate`` times as fast as the machine's, and can be set forward."""

    def __init__(self, rate: float = 1.0) -> None:
        self._began, self._rate, self._ahead_s = time.monotonic(), rate, 0.0

    def __call__(self) -> float:
        return self._began + (time.monotonic() - self._began) * self._rate + self._ahead_s

    def step(self, seconds: float) -> None:
        """As when a suspended machine wakes up."""
        self._ahead_s += seconds

"""Typed clients of actors: calls within a node go over the peer's socket, calls between nodes through Ray. Every call has a deadline and a name.

What either is handed are a method name and msgpack bytes. A peer is called over its socket as soon as there is one on this node, and from then on
never by another way: an actor that answered there and is gone must not be asked for elsewhere. Which node this is, Ray says: two of its nodes may be
on one machine, and are two nodes here.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray.actor import ActorHandle

from actors.places import SHORT
from streamrl.errors import ActorDied, WaitTimeout
from streamrl.protocol import rpc
from streamrl.protocol.channel import BlockingChannel, ChannelClient
from streamrl.telemetry.run_folder import RunFolder

SUCCESSOR_S = 0.2  # between two looks for the successor of an actor on another node: Ray does not tell when one gets its name


def this_node() -> str:
    """Ray's name of this node; empty without Ray."""
    return ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""


def socket_path(folder: RunFolder, name: str) -> Path:
    """Where the actor of that name answers calls of this node. All nodes see the run folder, but a socket in it leads to one."""
    return folder.sockets / (this_node()[:SHORT] or "here") / f"{name}.sock"


def client(handle: ActorHandle, name: str, interface: type, *, limit_s: float, folder: RunFolder | None = None, patience_s: float = 0.0) -> Any:
    """An object with the async methods of ``interface``, served by the actor. ActorDied when its process is gone, WaitTimeout after ``limit_s``.

    Without ``folder`` (the run's) all calls go through Ray. ``patience_s``: how long a peer that is being restarted may stay away; 0: it is one
    process, and its end is final.
    """
    path = socket_path(folder, name) if folder is not None else None
    channel: ChannelClient | None = None
    far = FarPeer(handle, name, limit_s, patience_s)

    async def send(method: str, payload: bytes) -> bytes:
        nonlocal channel
        if channel is None and path is not None and path.exists():
            channel = ChannelClient(path, name, limit_s, patience_s)
        if channel is not None:
            return await channel.send(method, payload)
        return await far.call("call", method, payload, what=method, request=far.next_request())

    return rpc.connect(interface, send)


def blocking_client(name: str, interface: type, *, limit_s: float, folder: RunFolder, patience_s: float = 0.0) -> Any | None:
    """As ``client``, for plain threads: its coroutines never suspend. None where the actor does not answer on this node (yet)."""
    path = socket_path(folder, name)
    return rpc.connect(interface, BlockingChannel(path, name, limit_s, patience_s).send) if path.exists() else None


class FarPeer:
    """An actor as it is called through Ray: by its handle, and once that process is dead by its name, which its successor has."""

    def __init__(self, handle: ActorHandle, name: str, limit_s: float, patience_s: float = 0.0) -> None:
        self._handle = handle
        self._name = name
        self._limit_s = limit_s
        self._patience_s = patience_s
        self._id, self._number = secrets.token_hex(8), 0

    def next_request(self) -> tuple[str, int] | None:
        """By which the peer knows a call that is repeated; None for a peer that has no successor."""
        self._number += 1
        return (self._id, self._number) if self._patience_s else None

    async def call(self, method: str, *arguments: Any, what: str, request: tuple[str, int] | None = None) -> Any:
        """The answer, of the peer or of its successor."""
        tracked = () if request is None else (request,)
        deadline = asyncio.get_running_loop().time() + self._limit_s
        while True:
            handle, left_s = self._handle, max(0.0, deadline - asyncio.get_running_loop().time())
            try:
                return await answer(getattr(handle, method).remote(*arguments, *tracked), f"{what} of {self._name}", left_s)
            except ActorDied as error:
                await self._find_successor(handle, error)

    async def _find_successor(self, dead: ActorHandle, error: ActorDied) -> None:
        """``error`` when there is none in time."""
        deadline = asyncio.get_running_loop().time() + self._patience_s
        while self._handle is dead:
            if asyncio.get_running_loop().time() >= deadline:
                raise error
            await asyncio.sleep(SUCCESSOR_S)
            found = await asyncio.to_thread(_actor_named, self._name)
            if found is not None and found._actor_id != dead._actor_id and self._handle is dead:
                self._handle = found


def _actor_named(name: str) -> ActorHandle | None:
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


async def answer(ref: ray.ObjectRef, what: str, limit_s: float) -> Any:
    """The result behind ``ref``, or the error that names the wait."""
    try:
        async with asyncio.timeout(limit_s):
            return await as_future(ref)
    except TimeoutError:
        raise WaitTimeout(f"{what} must be answered within {limit_s:g} s, got no answer; see the log of that actor") from None
    except ray.exceptions.RayActorError as error:
        raise ActorDied(f"{what} was not answered: its process has died ({_cause(error)})") from None
    except ray.exceptions.ActorUnschedulableError:
        raise ActorDied(f"{what} was not answered: the node it was meant for is gone") from None
    except ray.exceptions.RayTaskError as error:
        raise error.as_instanceof_cause() from None


def as_future(ref: ray.ObjectRef) -> asyncio.Future[Any]:
    """An awaitable of a Ray reference; cancelling it does not cancel the call."""
    return asyncio.wrap_future(ref.future())


def _cause(error: ray.exceptions.RayActorError) -> str:
    """First line of Ray's account, without its long advice; or our own error, when the process refused to start."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    refused = next((line for line in reversed(lines) if line.startswith("streamrl.errors.")), None)
    if refused is not None:
        return refused.partition(": ")[2]
    return next((line for line in lines if "exit" in line.lower() or "killed" in line.lower()), lines[0] if lines else "no cause given")[:200]

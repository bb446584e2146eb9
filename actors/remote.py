"""Typed clients of actors: calls within a node go over the peer's socket, calls between nodes through Ray. Every call has a deadline and a name.

What either is handed are a method name and msgpack bytes. A peer is called over its socket as soon as there is one on this node, and from then on
never by another way: an actor that answered there and is gone must not be asked for elsewhere.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray.actor import ActorHandle

from streamrl.errors import ActorDied, WaitTimeout
from streamrl.protocol import rpc
from streamrl.protocol.channel import ChannelClient
from streamrl.telemetry.run_folder import RunFolder

NODE = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]  # a run folder may be seen by several nodes; a socket in it leads to one


def socket_path(folder: RunFolder, name: str) -> Path:
    """Where the actor of that name answers calls of this node."""
    return folder.sockets / NODE / f"{name}.sock"


def client(handle: ActorHandle, name: str, interface: type, *, limit_s: float, folder: RunFolder | None = None, patience_s: float = 0.0) -> Any:
    """An object with the async methods of ``interface``, served by the actor. ActorDied when its process is gone, WaitTimeout after ``limit_s``.

    Without ``folder`` (the run's) all calls go through Ray. ``patience_s``: how long a peer that is being restarted may stay away; 0: it is one
    process, and its end is final. Ray's handle always means one process.
    """
    path = socket_path(folder, name) if folder is not None else None
    channel: ChannelClient | None = None

    async def send(method: str, payload: bytes) -> bytes:
        nonlocal channel
        if channel is None and path is not None and path.exists():
            channel = ChannelClient(path, name, limit_s, patience_s)
        if channel is not None:
            return await channel.send(method, payload)
        return await answer(handle.call.remote(method, payload), f"{method} of {name}", limit_s)

    return rpc.connect(interface, send)


async def answer(ref: ray.ObjectRef, what: str, limit_s: float) -> Any:
    """The result behind ``ref``, or the error that names the wait."""
    try:
        async with asyncio.timeout(limit_s):
            return await as_future(ref)
    except TimeoutError:
        raise WaitTimeout(f"{what} must be answered within {limit_s:g} s, got no answer; see the log of that actor") from None
    except ray.exceptions.RayActorError as error:
        raise ActorDied(f"{what} was not answered: its process has died ({_cause(error)})") from None
    except ray.exceptions.RayTaskError as error:
        raise error.as_instanceof_cause() from None


def as_future(ref: ray.ObjectRef) -> asyncio.Future[Any]:
    """An awaitable of a Ray reference; cancelling it does not cancel the call."""
    return asyncio.wrap_future(ref.future())


def _cause(error: ray.exceptions.RayActorError) -> str:
    """First line of Ray's account, without its long advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "exit" in line.lower() or "killed" in line.lower()), lines[0] if lines else "no cause given")[:200]

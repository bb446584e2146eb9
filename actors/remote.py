"""Typed clients of actors. What Ray is handed are a method name and msgpack bytes; every call has a deadline and a name."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
import ray.exceptions
from ray.actor import ActorHandle

from streamrl.errors import ActorDied, WaitTimeout
from streamrl.protocol import rpc


def client(handle: ActorHandle, name: str, interface: type, *, limit_s: float) -> Any:
    """An object with the async methods of ``interface``, served by the actor. ActorDied when its process is gone, WaitTimeout after ``limit_s``."""

    async def send(method: str, payload: bytes) -> bytes:
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

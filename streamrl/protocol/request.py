"""Which request is being answered, for a service that must recognise one it has answered in an earlier life.

    client "9f2c41d0a7b3e815" sends its request number 7     ->  current_request() == "9f2c41d0a7b3e815:7"
    the server dies, its successor gets the same request      ->  current_request() == "9f2c41d0a7b3e815:7" again

The id is set for the task that answers and what that task starts. It is None for a call that came without a channel.
"""

from __future__ import annotations

from contextvars import ContextVar

_CURRENT: ContextVar[str | None] = ContextVar("streamrl_request", default=None)


def current_request() -> str | None:
    """Id of the request that this task answers: equal for a repeat, different for any other request of any client."""
    return _CURRENT.get()


def enter_request(client: str, number: int) -> None:
    """Called by a server at the start of the task that answers."""
    _CURRENT.set(f"{client}:{number}")

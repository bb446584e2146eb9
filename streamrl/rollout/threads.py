"""User code that may be async or plain: plain functions run in threads, so that a blocking one holds up nobody else.

Apart from the threads of tools: an agent or an environment may take minutes, where tools take seconds. What happens to a call that never returns
is described there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from streamrl.rollout.tools.threads import ToolThreads

MAX_CALLS = 1024  # at a time; four times the default of rollout.max_sessions_per_actor, so that as many may be stuck before a session waits

_threads = ToolThreads(MAX_CALLS)


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of ``function``: awaited when it is a coroutine function, in a thread otherwise."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await _threads.run(partial(function, *args, **kwargs))
    return await result if inspect.isawaitable(result) else result

"""One session's side of an interaction: deadlines, checks of what comes back, and finalisation exactly once.

An interaction is the environment: when it raises, is late or answers nonsense, the session has failed (``env_error``); nothing is papered over
and no reward is invented. Knows nothing about tokens.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from numbers import Real
from typing import Any

import msgspec
import numpy as np

from streamrl.errors import SessionFailed
from streamrl.protocol.deadline import within
from streamrl.protocol.interfaces import Clock
from streamrl.protocol.waits import shown
from streamrl.rollout.contain import contained, words
from streamrl.rollout.interactions.base import BaseInteraction, Turn
from streamrl.rollout.threads import call

log = logging.getLogger(__name__)

CLOSE_S = 5.0  # a cancelled session is gone after this long

_closing: set[asyncio.Task[None]] = set()  # asyncio keeps no reference to a task by itself


class InteractionSession:
    """start → respond, any number of times → score → close, the last in a ``finally``."""

    def __init__(self, interaction: BaseInteraction, instance_id: str, kwargs: dict[str, Any], timeout_s: float, clock: Clock) -> None:
        self._interaction = interaction
        self._instance_id = instance_id
        self._kwargs = kwargs
        self._timeout_s = timeout_s
        self._clock = clock
        self._started = False
        self._closed: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Also an attempt that fails is finalised: it may have got hold of something before."""
        self._started = True
        instance_id = await self._ask("start_interaction", self._interaction.start_interaction, self._instance_id, **self._kwargs)
        if not isinstance(instance_id, str) or not instance_id:
            raise self._failed("start_interaction", f"returns the instance id, got {instance_id!r:.80}")
        self._instance_id = instance_id

    async def respond(self, messages: Sequence[dict[str, Any]]) -> Turn:
        """The environment's answer to the conversation so far. It gets copies, so it cannot change what the model is shown."""
        copies = [dict(message) for message in messages]
        answer = await self._ask("generate_response", self._interaction.generate_response, self._instance_id, copies, **self._kwargs)
        return self._turn(answer)

    async def score(self) -> float | None:
        """None when the class does not define ``calculate_score``."""
        if type(self._interaction).calculate_score is BaseInteraction.calculate_score:
            return None
        return self._number("calculate_score", await self._ask("calculate_score", self._interaction.calculate_score, self._instance_id))

    async def close(self) -> None:
        """Finalise, once however often this is called, and go on when the caller is cancelled meanwhile. Errors are logged, not raised."""
        if not self._started:
            return
        if self._closed is None:
            self._closed = asyncio.create_task(self._finalize())
            _closing.add(self._closed)
            self._closed.add_done_callback(_closing.discard)
        await asyncio.shield(self._closed)

    async def _finalize(self) -> None:
        what = f"finalize_interaction of {self._name}"
        try:
            await within(contained(call(self._interaction.finalize_interaction, self._instance_id)), CLOSE_S, what, self._clock)
        except Exception:  # the session has its outcome already; a failure here must not change it
            log.exception("%s failed in session %s", what, self._instance_id)

    async def _ask(self, method: str, function: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
        try:
            with shown(f"its {method}", f"interaction {self._name}", self._timeout_s):
                return await within(contained(call(function, *args, **kwargs)), self._timeout_s, f"{method} of {self._name}", self._clock)
        except SessionFailed:
            raise
        except Exception as error:
            raise SessionFailed(f"{method} of {self._name} raised {type(error).__name__}: {words(error)}", reason="env_error") from error

    def _turn(self, answer: Any) -> Turn:
        method = "generate_response"
        fields = msgspec.structs.astuple(answer) if isinstance(answer, Turn) else answer
        if not isinstance(fields, tuple | list) or len(fields) != 4:
            raise self._failed(method, f"returns (should_terminate, content, turn_score, additional), got {answer!r:.80}")
        ends, content, score, additional = fields
        if not isinstance(ends, bool | np.bool_):
            raise self._failed(method, f"returns a bool first, got {ends!r:.80}")
        if not isinstance(content, str) and not (ends and content is None):
            raise self._failed(method, f"returns text as its content, got {content!r:.80}")
        if additional is not None and not isinstance(additional, dict):
            raise self._failed(method, f"returns a dict last, got {additional!r:.80}")
        return Turn(bool(ends), content or "", self._number(method, score), additional or {})

    def _number(self, method: str, value: Any) -> float:
        if not isinstance(value, Real) or not math.isfinite(value):
            raise self._failed(method, f"gives a finite score, got {value!r:.80}")
        return float(value)

    def _failed(self, method: str, rule_and_got: str) -> SessionFailed:
        return SessionFailed(f"{method} of {self._name} {rule_and_got}; correct the interaction", reason="env_error")

    @property
    def _name(self) -> str:
        return f"interaction {self._interaction.name!r}"

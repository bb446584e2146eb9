"""Making the calls of a journal again: a buffer, the clock it sees, and the answers it may have to repeat.

Live calls and replayed ones go through the same ``make``, so what a call does can't depend on which of the two it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from streamrl.errors import ProtocolError, StreamrlError
from streamrl.replay import state
from streamrl.replay.buffer import ReplayBuffer
from streamrl.replay.fates import Fate
from streamrl.replay.journal import read_file
from streamrl.replay.records import ENCODER, BufferSpec, Call, Opening, arguments_of
from streamrl.replay.replies import Replies


class CallClock:
    """The buffer's time. It stands still during a call, so that the call can be made again at the very same instant."""

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._shift_s = 0.0
        self._held: float | None = None

    def __call__(self) -> float:
        return self._source() + self._shift_s if self._held is None else self._held

    def hold(self, instant: float | None = None) -> float:
        """Stand still, now or at ``instant``."""
        self._held = self() if instant is None else instant
        return self._held

    def run(self) -> None:
        self._held = None

    def go_on_from(self, instant: float) -> None:
        """The next instant is ``instant``: time that nobody saw pass does not count."""
        self._held = None
        self._shift_s = instant - self._source()


class Replayed:
    """A buffer with the memory that belongs to it; makes one call at a time, live or out of a journal."""

    def __init__(self, spec: BufferSpec, clock: CallClock) -> None:
        self.spec = spec
        self.clock = clock
        self.replies = Replies()
        self.fates: list[Fate] = []
        self.buffer = ReplayBuffer(
            spec.config,
            groups_per_step=spec.groups_per_step,
            n=spec.n,
            group_estimator=spec.group_estimator,
            filter_groups=spec.filter_groups,
            clock=clock,
            on_fate=self.fates.append,
        )

    def make(self, name: str, arguments: tuple[Any, ...], request: str | None) -> tuple[Any, StreamrlError | None]:
        """Result and error of one call; ``fates`` holds what it ended."""
        self.fates.clear()
        try:
            result = getattr(self.buffer, name)(*arguments)
        except StreamrlError as error:
            return None, error
        if request is not None and result is not None and (name != "lease" or result.leases):  # an empty reply means: go on waiting
            self.replies.remember(request, name, result)
        return result, None

    def make_again(self, call: Call) -> None:
        """A call of the journal. ProtocolError when it has other consequences than it had."""
        self.clock.hold(call.at)
        _, error = self.make(call.name, arguments_of(call), call.request)
        fault = None if error is None else type(error).__name__
        if self.fates != call.fates or fault != call.fault:
            raise ProtocolError(
                f"a journal's calls have the same consequences again, got {_said(self.fates, fault)} where the journal says "
                f"{_said(call.fates, call.fault)} for {call.name} at {call.at:.6f}; it was written by another version of streamrl"
            )

    def opening(self, anew: bool) -> Opening:
        return Opening(self.spec, self.clock(), anew, state.dump(self.buffer), self.replies.dump())


def replay(path: Path, clock: CallClock) -> Replayed:
    """The buffer as the calls in ``path`` left it; its time goes on from the last of them."""
    opening, calls = read_file(path)
    again = Replayed(opening.spec, clock)
    state.load(again.buffer, opening.state)
    again.replies.load(opening.replies)
    at = opening.at
    for call in calls:
        again.make_again(call)
        at = call.at
    clock.go_on_from(at)
    return again


def check_sessions(saved: BufferSpec, n: int) -> None:
    """ProtocolError unless groups of ``n`` sessions go on with those of ``saved``."""
    if n != saved.n:
        raise ProtocolError(f"a resumed run keeps rollout.n={saved.n}, got {n}: its groups have that many sessions; start a new run")


def with_spec(spec: BufferSpec, live: Replayed) -> Replayed:
    """The same state in a buffer of another configuration."""
    check_sessions(live.spec, spec.n)
    opening = msgspec.msgpack.decode(ENCODER.encode(live.opening(anew=False)), type=Opening)
    changed = Replayed(spec, live.clock)
    state.load(changed.buffer, opening.state)
    changed.replies.load(opening.replies)
    return changed


def _said(fates: list[Fate], fault: str | None) -> str:
    ends = ", ".join(f"{fate.uid} {fate.fate}{f'({fate.reason})' if fate.reason else ''} with {fate.rows} rows" for fate in fates[:5]) or "no end"
    return f"{ends} and {fault or 'no error'}"

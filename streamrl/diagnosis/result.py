"""What a diagnosis says: a verdict, the chain of waits that leads to it, its culprit, and what to do next."""

from __future__ import annotations

from typing import Literal

import msgspec

Verdict = Literal["fine", "waiting", "stuck", "starting", "ended", "unknown"]


class Link(msgspec.Struct, frozen=True):
    """``waiter`` waits for ``what`` of ``on``. ``since_s`` ago; ``left_s`` until the deadline, negative once it has passed."""

    waiter: str
    what: str
    on: str
    since_s: float | None = None  # None: unknown
    left_s: float | None = None  # None: no deadline of its own
    note: str = ""


class Diagnosis(msgspec.Struct, frozen=True):
    """``fine``: it goes on, and the culprit is only the slowest part. ``waiting``: nothing got done for a moment, within all deadlines. ``stuck``: it does
    not go on by itself, or has not for ``telemetry.stall_s``. ``unknown``: the files that would tell are not there."""

    verdict: Verdict
    headline: str
    culprit: str = ""  # empty: nobody
    chain: tuple[Link, ...] = ()
    next_step: str = ""
    evidence: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()  # actors whose stacks tell more

    @property
    def is_alarm(self) -> bool:
        return self.verdict == "stuck"


def span(seconds: float) -> str:
    """A duration as a person reads it.

    >>> span(0.4), span(47.2), span(200), span(3720)
    ('0.4 s', '47 s', '3 min 20 s', '1 h 2 min')
    """
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"

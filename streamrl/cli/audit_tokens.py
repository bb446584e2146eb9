"""The audit's book of the tokens that the policy wrote: where each of them went, added up from the journal's records alone.

Observations are left out. Tokens that a rollout actor had not reported when its process was killed are in no record, and in no number here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from streamrl.protocol.groups import WASTES, ReplayStats, SessionPush


class TokenBook:
    """``fates``: trained, stale, filtered, failed, evaluation; what has none is in flight, or was when the run ended in order."""

    def __init__(self, totals: ReplayStats | None = None) -> None:
        self.generated = 0 if totals is None else totals.generated_tokens
        self.fates: Counter[str] = Counter() if totals is None else Counter(totals.token_fates)
        self.stopped = 0  # of those without a fate: in no row, since the run's end stopped their sessions

    @property
    def in_flight(self) -> int:
        return self.generated - self.fates.total()

    def pushed(self, push: SessionPush) -> int:
        """An acknowledged session. The tokens of its rows."""
        written = sum(int(tag["response_len"]) for tag in push.tags) if push.written_tokens is None else push.written_tokens
        self.generated += written + push.lost_tokens
        self.fates["failed"] += push.lost_tokens
        return written

    def spent(self, tokens: int, end: str | None) -> None:
        """No push tells of them. ``end``: of their group, "evaluation" for one of none."""
        self.generated += tokens
        unfinished = self.in_flight - tokens
        self._end(tokens, end or "")
        self.stopped += self.in_flight - unfinished

    def ended(self, tokens: int, end: str) -> None:
        """They were in flight: ``trained``, ``superseded``, ``dropped(reason)``."""
        self._end(tokens, end)

    def rolled_back(self, tokens: int, kept: bool) -> None:
        self.fates["trained"] -= tokens
        self.fates["failed"] += 0 if kept else tokens

    def places(self) -> dict[str, int]:
        """All of them, by where they are."""
        return places(self.fates, self.in_flight)

    def _end(self, tokens: int, end: str) -> None:
        reason = end.partition("(")[2].rstrip(")") if "(" in end else end
        fate = "trained" if reason == "trained" else WASTES.get(reason, "failed")
        if fate != "in_flight":  # of a run that has ended
            self.fates[fate] += tokens


def places(fates: Mapping[str, int], in_flight: int) -> dict[str, int]:
    """Those that hold any."""
    return {place: count for place, count in sorted({**fates, "in_flight": in_flight}.items()) if count}

"""Which of the page's colours a line or a part has: the same name has the same colour everywhere. The colours themselves are in ``assets/report.css``."""

from __future__ import annotations

from streamrl.telemetry.summary import LEFT_OVER

_FREE = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 14, 15, 16, 17)  # for names without a colour of their own; the others are greys for waits

NAMED = {
    # states: work that stops generation, work, waits in greys
    "weight_sync": 6,
    "checkpoint": 8,
    "forward_backward": 0,
    "optimizer": 9,
    "publish": 3,
    "logprobs": 15,
    "advantages": 16,
    "evaluate": 17,
    "fetch": 5,
    "pack": 7,
    "generate": 2,
    "tool": 1,
    "reward": 14,
    "wait_data": 10,
    "wait_learner": 12,
    "wait_admission": 11,
    "start": 4,
    "idle": 13,
    # token and group fates
    "trained": 2,
    "stale": 1,
    "filtered": 3,
    "failed": 4,
    "dropped": 4,
    "evaluation": 0,
    "in flight": 10,
    LEFT_OVER: 10,
    "bound": 4,
    "capacity": 4,
}


def colours_of(names: list[str]) -> list[int]:
    """One colour a name: its own, else the first that none of the others has.

    >>> colours_of(["generate", "p50", "p95"])
    [2, 0, 1]
    """
    taken = {NAMED[name] for name in names if name in NAMED}
    free = [colour for colour in _FREE if colour not in taken] or list(_FREE)
    unnamed = [name for name in names if name not in NAMED]
    given = {name: free[place % len(free)] for place, name in enumerate(unnamed)}
    return [NAMED[name] if name in NAMED else given[name] for name in names]

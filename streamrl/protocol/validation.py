"""What a validation asks of a replica, and what it gets."""

from __future__ import annotations

from typing import Any

import msgspec


class ValQuestion(msgspec.Struct, frozen=True):
    """One answer to one row is wanted. ``number`` and ``sample`` make its seed, so the answers do not depend on which replica is asked."""

    row: dict[str, Any]
    number: int  # of the row among all rows of the validation
    sample: int = 0  # rollout.val_kwargs.n answers per row


class ValResult(msgspec.Struct, frozen=True):
    """``score`` None: the session failed for ``reason``, which is not a wrong answer."""

    score: float | None
    reason: str | None = None
    error: str = ""  # of a session that failed, shortened
    extra: dict[str, float] = {}  # what else the scorer counted: acc, ...
    pred: str | None = None  # what the scorer read as the answer, for a majority vote
    versions: tuple[int, int] | None = None  # oldest and newest weight version among its tokens; None: it failed

"""How a group, or an attempt of it, ended: the records that the ledger sums up, the journal keeps and the audit proves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from streamrl.replay.groups import Group

FateName = Literal["trained", "dropped", "superseded", "rolled_back"]


class Fate(msgspec.Struct, frozen=True, array_like=True):
    """One end of one attempt's rows.

    ``trained`` and ``dropped`` end the group, ``superseded`` only the attempt. ``rolled_back`` takes a ``trained`` back: with ``kept`` the same
    rows are in flight again, without it they are lost and the group is issued again under the next attempt.
    """

    uid: str
    seq_no: int
    attempt: int
    fate: FateName
    reason: str | None = None  # of a drop
    rows: int = 0
    tokens: int = 0  # response tokens of these rows
    lengths: list[int] = []  # response tokens per row; only of trained and dropped
    lag: int = 0  # of trained
    published: int = 0  # of trained: the version that ``lag`` was measured against
    kept: bool = False  # of rolled_back


OnFate = Callable[[Fate], None]


def fate_of(group: Group, fate: FateName, reason: str | None = None) -> Fate:
    """The end of what the group's current attempt has produced."""
    lengths = group.lengths()
    trained = fate == "trained"
    return Fate(
        uid=group.uid,
        seq_no=group.seq_no,
        attempt=group.attempt,
        fate=fate,
        reason=reason,
        rows=len(lengths),
        tokens=sum(lengths),
        lengths=[] if fate == "superseded" else lengths,
        lag=group.lag if trained else 0,
        published=group.checked_version if trained else 0,
    )

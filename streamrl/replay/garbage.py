"""Keys of rows that nobody needs any more, until the host has cleared them from the store.

A group that ended is also named by its uid: the store then forgets every row of it, also those whose push never arrived.
"""

from __future__ import annotations

from collections.abc import Iterable

from streamrl.protocol.groups import SessionPush
from streamrl.replay.groups import Group


class Garbage:
    """Three sources: superseded attempts and dropped groups at once, trained groups when their version is published."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._trained: list[str] = []
        self._reissued: dict[str, str] = {}  # superseded key -> uid of a group that waits for its clearing
        self._clearing: dict[str, str] = {}
        self._open: dict[str, int] = {}  # uid -> keys still being cleared

    def superseded(self, group: Group) -> None:
        """Rows of a given-up attempt of a group that will be issued again."""
        for key in group.keys():
            self._keys.append(key)
            self._reissued[key] = group.uid

    def dropped(self, group: Group) -> None:
        self._keys += [*group.keys(), *group.strays, group.uid]

    def trained(self, group: Group) -> None:
        self._trained += [*group.keys(), *group.strays, group.uid]

    def stray(self, session: SessionPush) -> None:
        """A refused push of a group that has ended."""
        self._keys += session.keys

    def release_trained(self) -> None:
        """The version trained from them is published."""
        self._keys += self._trained
        self._trained = []

    def collect(self) -> tuple[list[str], set[str]]:
        """All keys to clear now, and the uids that must not be leased before that is done."""
        keys, reissued = list(dict.fromkeys(self._keys)), self._reissued
        self._keys, self._reissued = [], {}
        self._clearing |= reissued
        for uid in reissued.values():
            self._open[uid] = self._open.get(uid, 0) + 1
        return keys, set(reissued.values())

    def cleared(self, keys: Iterable[str]) -> list[str]:
        """Uids whose superseded rows are all gone."""
        free = []
        for key in keys:
            uid = self._clearing.pop(key, None)
            if uid is not None:
                self._open[uid] -= 1
                if not self._open[uid]:
                    del self._open[uid]
                    free.append(uid)
        return free

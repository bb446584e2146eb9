"""Keys of rows that nobody needs any more, until the host has cleared them from the store.

A group that ended is also named by its uid: the store then forgets every row of it, also those whose push never arrived. Keys that were handed
out are remembered until the host confirms them, so that a host that dies in between clears them again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from streamrl.protocol.groups import SessionPush
from streamrl.replay.groups import Group
from streamrl.replay.provisional import TrainedGroup


class GarbageState(msgspec.Struct):
    """Everything the garbage knows; keys with the uid of their group."""

    keys: dict[str, str]
    trained: dict[str, str]
    clearing: dict[str, str]
    reissued: list[str]
    held: list[str]


class Garbage:
    """Three sources: superseded attempts and dropped groups at once, trained groups when their version is published."""

    def __init__(self) -> None:
        self._keys: dict[str, str] = {}  # to hand out: key -> uid
        self._trained: dict[str, str] = {}  # wait for their publication
        self._clearing: dict[str, str] = {}  # handed out, not confirmed
        self._open: Counter[str] = Counter()  # by uid: entries of _keys and _clearing
        self._reissued: dict[str, None] = {}  # uids issued again since the last collection
        self._held: dict[str, None] = {}  # uids that wait for their clearing

    def superseded(self, group: Group) -> None:
        """Rows of a given-up attempt of a group that will be issued again."""
        self._add(group.keys(), group.uid)
        if self._open[group.uid]:
            self._reissued[group.uid] = None

    def dropped(self, group: Group) -> None:
        self._add(_all_names(group), group.uid)

    def trained(self, group: Group) -> None:
        for key in _all_names(group):
            self._trained[key] = group.uid

    def settle(self, trained: TrainedGroup) -> None:
        """Rows of a trained group that were kept and are not needed any more."""
        if trained.published:
            self.dropped(trained.group)
        else:
            self.trained(trained.group)

    def lost(self, groups: Iterable[Group]) -> None:
        """Trained groups will be issued again: what is left of their old rows must be gone before."""
        uids = {group.uid: group for group in groups}
        for key in [key for key, uid in self._trained.items() if uid in uids]:
            self._add([key], self._trained.pop(key))
        for group in uids.values():
            self.superseded(group)

    def stray(self, session: SessionPush) -> None:
        """A refused push of a group that has ended."""
        self._add(session.keys, session.uid)

    def release_trained(self) -> None:
        """The version trained from them is published."""
        for key, uid in self._trained.items():
            self._add([key], uid)
        self._trained = {}

    def waits(self) -> bool:
        """Whether a collection would change anything."""
        return bool(self._keys or self._reissued)

    def collect(self) -> tuple[list[str], list[str]]:
        """All keys to clear now, and the uids that must not be leased before that is done."""
        keys, self._keys = self._keys, {}
        for key in keys.keys() & self._clearing.keys():
            self._open[self._clearing[key]] -= 1  # one confirmation will answer for both
        self._clearing |= keys
        held = [uid for uid in self._reissued if self._open[uid]]
        self._held |= dict.fromkeys(held)
        self._reissued = {}
        return list(keys), held

    def cleared(self, keys: Iterable[str]) -> list[str]:
        """Uids whose superseded rows are all gone."""
        free = []
        for key in keys:
            uid = self._clearing.pop(key, None)
            if uid is None:
                continue
            self._open[uid] -= 1
            if not self._open[uid]:
                del self._open[uid]
                if uid in self._held:
                    del self._held[uid]
                    free.append(uid)
        return free

    def ask_again(self) -> None:
        """The host that was clearing is gone: hand its keys out once more."""
        for key in self._clearing.keys() & self._keys.keys():
            self._open[self._clearing.pop(key)] -= 1
        self._keys = self._clearing | self._keys
        self._clearing = {}

    def is_held(self, uid: str) -> bool:
        return uid in self._held

    def dump(self) -> GarbageState:
        return GarbageState(dict(self._keys), dict(self._trained), dict(self._clearing), list(self._reissued), list(self._held))

    def load(self, state: GarbageState) -> None:
        """Continue from a saved state."""
        self._keys, self._trained, self._clearing = state.keys, state.trained, state.clearing
        self._open = Counter([*state.keys.values(), *state.clearing.values()])
        self._reissued, self._held = dict.fromkeys(state.reissued), dict.fromkeys(state.held)

    def _add(self, keys: Iterable[str], uid: str) -> None:
        for key in keys:
            if key not in self._keys:
                self._keys[key] = uid
                self._open[uid] += 1


def _all_names(group: Group) -> list[str]:
    return [*group.keys(), *group.strays, group.uid]

"""Trained groups whose update no checkpoint contains yet: a learner that falls back to its checkpoint gives them back.

Each trained group gets a number, counted over the whole run. A checkpoint's *mark* is the number of groups trained before it: a later one is
final, so those below it are forgotten here. With ``retains`` the rows are kept from being freed until then, at most ``retain_bytes`` worth (an
estimate from token counts), the oldest given up first. Which rows are really freed, and when, is the garbage's business.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamrl.errors import ProtocolError
from streamrl.replay.groups import Group

BYTES_PER_TOKEN = 96  # upper estimate over all columns of a row, prompt and answer alike
MAX_GROUPS = 1 << 16  # remembered; a run that never saves can't be rolled back any more after that many


@dataclass(slots=True)
class TrainedGroup:
    """A trained group. Without ``held`` its rows may be gone; ``group.sessions`` is then empty and only their totals are known."""

    group: Group
    number: int
    rows: int
    tokens: int
    size_bytes: int
    held: bool
    published: bool = False  # a version that contains it is served, or none was made of its step
    written: int = 0  # tokens that the policy wrote


class Provisional:
    """In order of training. ``count`` groups were trained so far, those below ``final`` for good."""

    def __init__(self, retains: bool, retain_bytes: int) -> None:
        self.retains = retains
        self.count = 0
        self.final = 0
        self.forgotten = 0  # number of the first group that can still come back
        self._retain_bytes = retain_bytes
        self._groups: dict[str, TrainedGroup] = {}
        self._held: dict[str, TrainedGroup] = {}
        self._held_bytes = 0
        self._unpublished: dict[str, TrainedGroup] = {}

    def groups(self) -> list[TrainedGroup]:
        return list(self._groups.values())

    def held(self, uid: str) -> Group | None:
        """The group when its rows are kept."""
        trained = self._held.get(uid)
        return None if trained is None else trained.group

    def add(self, group: Group, published: bool = False) -> list[TrainedGroup]:
        """Groups whose rows are not kept any longer: beyond the budget, or all when nothing is retained. The caller frees them, then ``let_go``."""
        lengths = group.lengths()
        size_bytes = BYTES_PER_TOKEN * sum(tag.get("seq_len", tag["response_len"]) for tag in group.tags())
        self._insert(TrainedGroup(group, self.count, len(lengths), sum(lengths), size_bytes, True, published, group.written()))
        self.count += 1
        if len(self._groups) > MAX_GROUPS:
            return [*self._forget_oldest(), *self.over_budget()]
        return self.over_budget()

    def over_budget(self) -> list[TrainedGroup]:
        """Held groups, oldest first, that must be let go."""
        over, kept_bytes = [], self._held_bytes
        for trained in self._held.values():
            if self.retains and kept_bytes <= self._retain_bytes:
                break
            over.append(trained)
            kept_bytes -= trained.size_bytes
        return over

    def let_go(self, trained: TrainedGroup) -> None:
        """Its rows may be freed from now on."""
        if trained.held:
            self._unhold(trained)
            trained.held = False
            trained.group.sessions, trained.group.strays = {}, []

    def kept_unpublished(self) -> list[str]:
        """Uids whose rows will have no other use than a rollback once the next version is published."""
        return [uid for uid, trained in self._unpublished.items() if trained.held]

    def kept_published(self) -> list[str]:
        """Uids whose rows are kept for a rollback only."""
        return [uid for uid, trained in self._held.items() if trained.published]

    def publish(self) -> None:
        """A version with all of them is served."""
        for trained in self._unpublished.values():
            trained.published = True
        self._unpublished = {}

    def finish(self, mark: int) -> list[TrainedGroup]:
        """A checkpoint contains the first ``mark`` groups. Those that are final now; the caller frees the held ones."""
        if not self.final <= mark <= self.count:
            raise ProtocolError(f"marks of checkpoints only grow, up to the {self.count} trained groups, got {mark} after {self.final}; pass snapshot().mark")
        self.final = mark
        return self._remove([trained for trained in self._groups.values() if trained.number < mark])

    def take_back(self, mark: int | None) -> list[TrainedGroup]:
        """The groups trained after ``mark`` (None: after the newest checkpoint) are not trained any more."""
        mark = self.final if mark is None else mark
        if not self.can_take_back(mark):
            least = max(self.final, self.forgotten)
            todo = "resume from the newest checkpoint, and set trainer.save_freq so that there is one"
            raise ProtocolError(f"groups trained after a checkpoint come back, from number {least} to {self.count}, got mark {mark}; {todo}")
        taken = [trained for trained in self._groups.values() if trained.number >= mark]
        self.count = mark
        return self._remove(taken)

    def can_take_back(self, mark: int) -> bool:
        """Whether all groups trained after ``mark`` are known here."""
        return max(self.final, self.forgotten) <= mark <= self.count

    def load(self, count: int, final: int, forgotten: int, groups: list[TrainedGroup]) -> None:
        """Continue from a saved state."""
        self.count, self.final, self.forgotten = count, final, forgotten
        for trained in groups:
            self._insert(trained)

    def _insert(self, trained: TrainedGroup) -> None:
        uid = trained.group.uid
        self._groups[uid] = trained
        if trained.held:
            self._held[uid] = trained
            self._held_bytes += trained.size_bytes
        if not trained.published:
            self._unpublished[uid] = trained

    def _unhold(self, trained: TrainedGroup) -> None:
        if self._held.pop(trained.group.uid, None) is not None:
            self._held_bytes -= trained.size_bytes

    def _forget_oldest(self) -> list[TrainedGroup]:
        oldest = next(iter(self._groups.values()))
        self.forgotten = oldest.number + 1
        return self._remove([oldest])

    def _remove(self, gone: list[TrainedGroup]) -> list[TrainedGroup]:
        for trained in gone:
            self._unhold(trained)
            self._groups.pop(trained.group.uid)
            self._unpublished.pop(trained.group.uid, None)
        return gone

"""The hard bound on policy lag, and which running groups a batch must wait for.

``lag`` is the published version minus the oldest version among a group's rows, queue time included, never below 0. The comparison is always with
the *published* version: one that the trainer holds but no engine has taken up would make bound 0 evict for ever.

Whom a batch waits for is judged earlier than what is dropped: tokens become known when a session is pushed, so a group that has been leased
under version v is waited for as if its first token were of version v. Without that every answer longer than the bound's worth of steps would
arrive too old, and long answers would never be trained. Nothing is dropped on that assumption.
"""

from __future__ import annotations


def lag(published: int, oldest: int | None) -> int:
    """Staleness of a group; one without a token has staleness 0.

    >>> lag(9, 2), lag(1, None), lag(3, 4)
    (7, 0, 0)
    """
    return 0 if oldest is None else max(0, published - oldest)


class VersionBuckets:
    """Running groups by the oldest version their tokens can have. There are few versions, so a question costs the number of versions, not of groups."""

    def __init__(self) -> None:
        self._uids: dict[int, dict[str, None]] = {}

    def add(self, version: int, uid: str) -> None:
        self._uids.setdefault(version, {})[uid] = None

    def discard(self, version: int, uid: str) -> None:
        bucket = self._uids.get(version)
        if bucket is not None:
            bucket.pop(uid, None)
            if not bucket:
                del self._uids[version]

    def at_most(self, version: int) -> list[str]:
        """Groups that may hold tokens of ``version`` or older."""
        return [uid for old, bucket in self._uids.items() if old <= version for uid in bucket]


class Horizon:
    """Where a batch stands between two publications.

    B groups are consumed per version. ``claimed`` counts groups taken and not yet published; the batch that brings it to a multiple of B
    is the last before a publication, and what still runs when that one is taken will be ``claimed // B + 1`` versions further on.
    """

    def __init__(self, groups_per_step: int, max_staleness: int) -> None:
        self.per_step = groups_per_step
        self._bound = max_staleness
        self.claimed = 0

    def is_last_batch(self, num_groups: int) -> bool:
        """Taking ``num_groups`` more completes the groups of a version."""
        return self.claimed % self.per_step + num_groups >= self.per_step

    def late_version(self, published: int) -> int:
        """A running group with tokens of this version or older would break the bound once the version of the next batch is published.

        With E = 7 and version 9 published, rows of version 2 are late (7 >= 7).
        """
        return published + self.claimed // self.per_step - self._bound

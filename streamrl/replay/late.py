"""Groups that sampling waits for (strategy ``wait``): those that the next publication would make too stale.

The last batch before a publication is held back while one of them runs; each has ``wait_s`` from the moment it was first waited for.
"""

from __future__ import annotations

from streamrl.config.rollout import ReplayConfig
from streamrl.replay.groups import Group, GroupTable
from streamrl.replay.staleness import Horizon


class LateGroups:
    """Reads the table, starts the clocks of late groups; whoever owns the time drops those that ran out."""

    def __init__(self, config: ReplayConfig, table: GroupTable, horizon: Horizon) -> None:
        self._config = config
        self._table = table
        self._horizon = horizon
        self._late: dict[str, Group] = {}

    def must_wait(self, num_groups: int, published: int, leasable: int, now: float) -> bool:
        """Whether a batch that could be formed is held back by late groups; starts their clocks. Of the pending ones ``leasable`` could run now."""
        late = self._too_late(published, leasable) if self._horizon.is_last_batch(num_groups) else []
        for group in late:
            if group.late_since is None:
                group.late_since = now
                self._late[group.uid] = group
                self._table.changes += 1  # a deadline came up
        return bool(late)

    def groups(self) -> list[Group]:
        """Those in flight that sampling has been waiting for, in sequence order."""
        if self._late:
            self._late = {uid: group for uid, group in self._late.items() if group.late_since is not None and group.state in ("pending", "running")}
        return sorted(self._late.values(), key=lambda group: group.seq_no)

    def until(self, group: Group) -> float:
        """When its time is up."""
        return (group.late_since or 0.0) + self._config.wait_s

    def load(self) -> None:
        """Find them in a table that was filled from a saved state."""
        self._late = {group.uid: group for group in self._table.groups.values() if group.late_since is not None}

    def _too_late(self, published: int, leasable: int) -> list[Group]:
        """Groups in flight that would break the bound once the next batch's version is published."""
        if self._config.max_off_policy_strategy != "wait":
            return []
        late_version = self._horizon.late_version(published)
        if late_version >= published:  # even groups that are pending are due: E = 0, or the whole horizon is claimed
            return self._table.in_state("pending")[:leasable] + self._table.in_state("running")
        return [self._table.groups[uid] for uid in self._table.running_versions.at_most(late_version)]

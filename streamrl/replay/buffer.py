"""The replay buffer: a pure state machine over groups. No asyncio, no I/O, no tensors; time comes from ``clock``.

It alone owns group state, leases and the ledger. Guarantees, after every call:
- each admitted group is alive in one state or has ended in exactly one of trained, dropped(reason); the ledger closes;
- at most ``(max_staleness + 1) * groups_per_step`` groups are outstanding (trained ones count until their version is published);
- no group above the bound leaves ``take`` or survives ``check_bound``; none is trained twice;
- the same events in the same order choose the same groups.

It doesn't survive its process (that is the snapshot's business) and never touches the store: keys of rows that nobody needs any more pile up
until the host calls ``collect_garbage``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from streamrl.config.rollout import ReplayConfig
from streamrl.errors import Closed, ProtocolError, TakeTimeout
from streamrl.protocol.groups import (
    AdmissionReply,
    GroupLease,
    Heartbeat,
    LeaseReply,
    ReplaySnapshot,
    ReplayStats,
    SavedGroup,
    SessionPush,
    TakenBatch,
)
from streamrl.protocol.keys import check_uid
from streamrl.protocol.meta import KVBatchMeta
from streamrl.protocol.trajectory import Prompt
from streamrl.replay.admission import AdmissionControl
from streamrl.replay.groups import Group
from streamrl.replay.lease import LearnerLease, LearnerLeases
from streamrl.replay.lifecycle import Lifecycle
from streamrl.replay.outcome import OutcomeRule
from streamrl.replay.report import blocked_by, take_timeout
from streamrl.replay.staleness import Horizon, lag


class ReplayBuffer:
    """``groups_per_step`` is B, the groups consumed per published version; ``n`` the sessions of a group.

    >>> buffer = ReplayBuffer(ReplayConfig(max_staleness=1), groups_per_step=4, n=2)
    >>> buffer.admission(100).slots
    8
    """

    def __init__(
        self, config: ReplayConfig, *, groups_per_step: int, n: int, group_estimator: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.n = n
        self.clock = clock
        self.published_version = 0
        self.closed = False
        self.end_of_data = False
        rule = OutcomeRule(n, config.min_sessions, group_estimator, config.max_attempts)
        self._life = Lifecycle(config, rule, clock)
        self.table, self.ledger, self.breaker = self._life.table, self._life.ledger, self._life.breaker
        self._admission = AdmissionControl(config.max_staleness, groups_per_step, config.max_inflight_groups)
        self._horizon = Horizon(groups_per_step, config.max_staleness)
        self._learners = LearnerLeases()
        self._late: dict[str, Group] = {}  # groups that sampling waits for, by uid
        self._next_seq_no = 0
        self._frontier: tuple[int, int] | None = None  # (epoch, position) after the last admitted prompt
        self._trained_unpublished = 0
        self._claims_trained = 0  # claims of committed batches, returned to the horizon at the next publication

    # ---- the prompt feeder ------------------------------------------------------------------------------------------------------------

    @property
    def capacity_groups(self) -> int:
        return self._admission.capacity

    @property
    def outstanding(self) -> int:
        """Groups that hold a slot."""
        return len(self.table.groups) + self._trained_unpublished

    def admission(self, max_groups: int) -> AdmissionReply:
        """How many groups may be admitted now and, if none, which limit binds."""
        if self.closed or self.end_of_data:
            return AdmissionReply(0, closed=True)
        self.breaker.check()
        inflight = self.table.count["pending"] + self.table.count["running"]
        return self._admission.slots(max_groups, self.outstanding, inflight, self.breaker.slots(self.clock()))

    def admit(self, prompts: list[Prompt]) -> list[int]:
        """Sequence numbers. A quarantined prompt gets one too and is dropped at once. All or nothing on error."""
        if self.closed or self.end_of_data:
            raise Closed("groups are admitted until the end of the prompts, got more after it; stop the feeder when admission says closed")
        if self.outstanding + len(prompts) > self.capacity_groups:
            raise ProtocolError(
                f"at most {self.capacity_groups} groups are outstanding, got {len(prompts)} more on top of {self.outstanding}; ask admission() first"
            )
        uids = [check_uid(prompt.uid) for prompt in prompts]
        twice = sorted({uid for uid in uids if uids.count(uid) > 1 or uid in self.table.groups or uid in self.table.ended})
        if twice:
            raise ProtocolError(f"a uid is admitted once, got {twice[:5]} again; the prompt source must name each prompt anew")
        first = self._next_seq_no
        self._next_seq_no += len(prompts)
        for seq_no, prompt in enumerate(prompts, first):
            self._life.admit(prompt, seq_no)
            self._frontier = max(self._frontier or (0, 0), (prompt.epoch, prompt.position + 1))
        return list(range(first, self._next_seq_no))

    def end_of_prompts(self) -> None:
        """No prompt will follow."""
        self.end_of_data = True
        self.table.changes += 1

    # ---- rollout actors ---------------------------------------------------------------------------------------------------------------

    def lease(self, worker: str, max_groups: int) -> LeaseReply:
        """Pending groups in sequence order; ``closed`` when there will never be another."""
        now = self.clock()
        self._life.workers.renew(worker, now)
        leases: list[GroupLease] = []
        while len(leases) < max_groups and len(self.table.pending):
            group = self.table.pending.pop()
            self._life.run(group, worker, self.published_version)
            leases.append(GroupLease(group.uid, group.attempt, group.seq_no, group.row, self.n, self.published_version + 1))
        return LeaseReply(leases, closed=not leases and self._no_more_leases())

    def push(self, session: SessionPush) -> bool:
        """Take in a settled session; the last one of the attempt settles the group. False: this very push had arrived before."""
        group = self._life.push(session)
        if group is not None and group.state in ("running", "ready"):
            self._drop_if_over_age(group)
        return group is not None

    def heartbeat(self, worker: str) -> Heartbeat:
        """Renews the worker's leases; names what it must stop."""
        now = self.clock()
        self._life.workers.renew(worker, now)
        return Heartbeat(self._life.workers.cancelled(worker, now))

    def give_back(self, worker: str, leases: Iterable[tuple[str, int]]) -> None:
        """Orderly return: the groups are issued again with a new attempt that doesn't count as a failed one."""
        for uid, attempt in leases:
            self._life.workers.acknowledge(worker, (uid, attempt))
            group = self.table.groups.get(uid)
            if group is not None and group.state == "running" and group.attempt == attempt and group.worker == worker:
                self._life.reissue(group)

    def release_worker(self, worker: str) -> int:
        """The worker died. Number of groups that it held."""
        lost = self._life.workers.forget(worker)
        self._life.lose(lost)
        return len(lost)

    # ---- the trainer ------------------------------------------------------------------------------------------------------------------

    def take(self, num_groups: int) -> TakenBatch | None:
        """A learner lease on the ``num_groups`` ready groups with the lowest sequence numbers; None when the batch can't be formed yet.

        Closed when it never can: what is left then ends as dropped(shutdown). BreakerOpen when the breaker has tripped.
        """
        if num_groups < 1:
            raise ProtocolError(f"a batch has at least one group, got num_groups={num_groups}; ask for a positive number")
        self.breaker.check()
        self._close_if_exhausted(num_groups)
        if len(self.table.ready) < num_groups or self._must_wait(num_groups):
            return None
        groups = [self.table.ready.pop() for _ in range(num_groups)]
        for group in groups:
            self.table.move(group, "leased")
            group.lag = lag(self.published_version, group.oldest_version)
        self._assert_bound(groups)
        lease = self._learners.grant(groups)
        self._horizon.claimed += num_groups
        return self._batch(lease)

    def check_bound(self, lease_id: int) -> list[str]:
        """Drop the leased groups whose lag is above the bound *now*; called before the first optimizer step of the batch."""
        lease = self._learners.held(lease_id)
        stale = []
        for group in list(lease.groups.values()):
            group.lag = lag(self.published_version, group.oldest_version)
            if group.lag > self.config.max_staleness:
                stale.append(group.uid)
                del lease.groups[group.uid]
                self._life.drop(group, "stale")
        return stale

    def commit(self, lease_id: int, rejected: Iterable[str] = ()) -> None:
        """The leased groups are trained; ``rejected`` ones end as dropped(group_too_small). Repeating it changes nothing."""
        if self._learners.has_ended_as(lease_id, "committed"):
            return
        lease = self._learners.held(lease_id)
        refused = set(rejected)
        unknown = sorted(refused - set(lease.groups))
        if unknown:
            raise ProtocolError(f"only groups of the lease can be rejected, got {unknown[:5]} which lease {lease_id} doesn't hold; pass uids of its batch")
        for group in lease.groups.values():
            if group.uid in refused:
                self._life.drop(group, "group_too_small")
            else:
                self._life.train(group)
                self._trained_unpublished += 1
        self._claims_trained += lease.size
        self._learners.end(lease, "committed")

    def skip(self, lease_id: int) -> None:
        """No optimizer step was applied: the groups end as dropped(skipped_step) and their slots are free at once."""
        if self._learners.has_ended_as(lease_id, "skipped"):
            return
        lease = self._learners.held(lease_id)
        for group in lease.groups.values():
            self._life.drop(group, "skipped_step")
        self._horizon.claimed -= lease.size
        self._learners.end(lease, "skipped")

    def abandon(self, lease_id: int) -> None:
        """The learner gave up: the groups are ready again, in their old order."""
        if self._learners.has_ended_as(lease_id, "abandoned"):
            return
        lease = self._learners.held(lease_id)
        for group in lease.groups.values():
            self.table.move(group, "ready")
        self._horizon.claimed -= lease.size
        self._learners.end(lease, "abandoned")
        self._drop_over_age()
        if self.closed:
            self._drop_all("shutdown")

    def published(self, version: int) -> None:
        """All serving replicas hold ``version``: frees the slots of what was trained into it and drops what is now too old."""
        if version < self.published_version or (version == self.published_version and self._trained_unpublished):
            raise ProtocolError(f"published versions only grow, got version {version} after {self.published_version}; publish each version once")
        self._trained_unpublished = 0
        self._horizon.claimed -= self._claims_trained
        self._claims_trained = 0
        self.published_version = version
        self._life.garbage.release_trained()
        self.table.changes += 1
        self._drop_over_age()

    # ---- time, end, persistence ---------------------------------------------------------------------------------------------------------

    def expire(self) -> int:
        """Act on what ran out: leases of silent workers, groups that sampling has waited for too long. Number of groups touched."""
        now = self.clock()
        lost = self._life.workers.expire(now)
        self._life.lose(lost)
        late = [group for group in self.late_groups() if self._late_until(group) <= now]
        for group in late:
            self._life.drop(group, "stale")
        return len(lost) + len(late)

    def next_deadline(self) -> float | None:
        """Clock time at which something changes by itself; None when nothing will."""
        late = [self._late_until(group) for group in self.late_groups()]
        times = [self._life.workers.next_deadline(), self.breaker.next_deadline(self.clock()), *late]
        return min((t for t in times if t is not None), default=None)

    def close(self) -> None:
        """Orderly end: nothing is admitted, leased or taken any more. A learner may still commit what it holds."""
        if not self.closed:
            self.closed = self.end_of_data = True
            self._drop_all("shutdown")
            self.table.changes += 1

    def snapshot(self) -> ReplaySnapshot:
        """Untrained groups and totals. Take it after the commit of the batch that the checkpoint contains."""
        groups = [SavedGroup(g.uid, g.seq_no, g.attempt, g.row) for g in sorted(self.table.groups.values(), key=lambda g: g.seq_no)]
        return ReplaySnapshot(
            published_version=self.published_version,
            next_seq_no=self._next_seq_no,
            groups=groups,
            stats=self.stats(),
            quarantine=self._life.quarantine.names(),
            frontier=self._frontier,
        )

    def restore(self, snapshot: ReplaySnapshot) -> None:
        """Continue a run in an empty buffer: groups are pending with attempt + 1 and their old sequence number; totals go on."""
        if self.ledger.admitted or self.table.groups:
            raise ProtocolError(f"a snapshot is restored into an empty buffer, got one with {self.ledger.admitted} admitted groups; restore before feeding")
        now = self.clock()
        self.published_version, self._next_seq_no, self._frontier = snapshot.published_version, snapshot.next_seq_no, snapshot.frontier
        self.ledger.restore(snapshot.stats)
        self._life.quarantine.restore(snapshot.quarantine)
        self._trained_unpublished = snapshot.stats.trained_unpublished  # until the restored weights are published, under a number of their own
        for saved in sorted(snapshot.groups, key=lambda group: group.seq_no):
            self.table.add(Group(saved.uid, saved.seq_no, saved.row, now, attempt=saved.attempt + 1))

    def stats(self) -> ReplayStats:
        """Counts at this instant."""
        count, oldest = self.table.count, next(iter(self.table.groups.values()), None)
        stats = ReplayStats(
            published_version=self.published_version,
            pending=count["pending"],
            running=count["running"],
            ready=count["ready"],
            leased=count["leased"],
            trained_unpublished=self._trained_unpublished,
            outstanding=self.outstanding,
            capacity_groups=self.capacity_groups,
            oldest_group_age_s=0.0 if oldest is None else self.clock() - oldest.admitted_at,
            blocked_by=blocked_by(self),
        )
        return self.ledger.fill(stats)

    def take_timeout(self, num_groups: int, wait_s: float) -> TakeTimeout:
        """The error of a take that ran out of time: counts, oldest groups in flight, and what blocks."""
        return take_timeout(self, num_groups, wait_s)

    def late_groups(self) -> list[Group]:
        """Groups in flight that sampling has been waiting for."""
        self._late = {uid: group for uid, group in self._late.items() if group.late_since is not None and group.state in ("pending", "running")}
        return list(self._late.values())

    def collect_garbage(self) -> list[str]:
        """Keys of rows (and uids of ended groups) that the host must clear. Groups about to be issued again aren't leased until
        ``garbage_cleared(keys)``, so that their next rows can't be taken for the old ones."""
        keys, held = self._life.garbage.collect()
        for uid in held:
            group = self.table.groups.get(uid)
            if group is not None:
                self.table.pending.discard(group)
        return keys

    def garbage_cleared(self, keys: Iterable[str]) -> None:
        """The store has freed ``keys``."""
        for uid in self._life.garbage.cleared(keys):
            group = self.table.groups.get(uid)
            if group is not None and group.state == "pending":
                self.table.pending.add(group)
                self.table.changes += 1

    # ---- staleness and end of data ------------------------------------------------------------------------------------------------------

    def _drop_over_age(self) -> None:
        """After a publication: ready groups above the bound are stale, running ones doomed."""
        for group in self.table.in_state("ready") + self.table.in_state("running"):
            self._drop_if_over_age(group)

    def _drop_if_over_age(self, group: Group) -> None:
        if lag(self.published_version, group.oldest_version) > self.config.max_staleness:
            self._life.drop(group, "stale" if group.state == "ready" else "doomed")

    def _too_late(self) -> list[Group]:
        """Groups in flight that would break the bound once the next batch's version is published (strategy wait)."""
        if self.config.max_off_policy_strategy != "wait":
            return []
        late_version = self._horizon.late_version(self.published_version)
        if late_version >= self.published_version:  # even groups that are pending are due: E = 0, or the whole horizon is claimed
            return self.table.in_state("pending") + self.table.in_state("running")
        return [self.table.groups[uid] for uid in self.table.running_versions.at_most(late_version)]

    def _must_wait(self, num_groups: int) -> bool:
        """Whether a batch that could be formed is held back by late groups; starts their clocks."""
        late = self._too_late() if self._horizon.is_last_batch(num_groups) else []
        now = self.clock()
        for group in late:
            if group.late_since is None:
                group.late_since = now
                self._late[group.uid] = group
                self.table.changes += 1  # a deadline came up
        return bool(late)

    def _late_until(self, group: Group) -> float:
        return (group.late_since or 0.0) + self.config.wait_s

    def _assert_bound(self, groups: list[Group]) -> None:
        over = {group.uid: group.lag for group in groups if group.lag > self.config.max_staleness}
        if over:
            raise ProtocolError(f"no group above max_staleness={self.config.max_staleness} is taken, got lags {over}; this is a bug of the replay buffer")

    def _batch(self, lease: LearnerLease) -> TakenBatch:
        keys: list[str] = []
        tags: list[dict[str, Any]] = []
        for group in lease.groups.values():
            keys += group.keys()
            tags += group.tags()
        meta = KVBatchMeta("train", keys, tags, extra_info={"published_version": self.published_version})
        return TakenBatch(lease.lease_id, meta, list(lease.groups), [group.lag for group in lease.groups.values()], self.published_version)

    def _no_more_leases(self) -> bool:
        return self.closed or (self.end_of_data and not self.table.count["pending"] and not self.table.count["running"])

    def _close_if_exhausted(self, num_groups: int) -> None:
        """Raises Closed once fewer than ``num_groups`` groups can ever come; leased ones may still come back."""
        if self.end_of_data and len(self.table.groups) < num_groups:
            self.close()
        if self.closed:
            raise Closed(f"batches come until the prompts end, got a call for {num_groups} groups after {self.ledger.trained} trained; stop training")

    def _drop_all(self, reason: str) -> None:
        for group in sorted(self.table.groups.values(), key=lambda g: g.seq_no):
            if group.state != "leased":
                self._life.drop(group, reason)

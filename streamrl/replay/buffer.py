"""The replay buffer: a pure state machine over groups. No asyncio, no I/O, no tensors; time comes from ``clock``.

It alone owns group state, leases and the ledger. Guarantees, after every call:
- each admitted group is alive in one state or has ended in exactly one of trained, dropped(reason); the ledger closes;
- at most ``(max_staleness + 1) * groups_per_step`` groups are outstanding (those of a trained batch count until its version is published);
- no group above the bound leaves ``take`` or survives ``check_bound``; none is trained twice;
- the same events in the same order choose the same groups.

It is deterministic: the same calls at the same times give the same state, which is what ``journal.py`` builds on. It never touches the store: keys
of rows that nobody needs any more pile up until the host calls ``collect_garbage``. What happens around a restart stands in ``restart.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from streamrl.config.filter_groups import FilterGroups
from streamrl.config.rollout import ReplayConfig
from streamrl.errors import Closed, ProtocolError, TakeTimeout
from streamrl.protocol.groups import (
    AdmissionReply,
    GroupLease,
    Heartbeat,
    LeaseReply,
    ReplaySnapshot,
    ReplayStats,
    SessionPush,
    SpentTokens,
    TakenBatch,
)
from streamrl.protocol.keys import check_uid
from streamrl.protocol.trajectory import Prompt
from streamrl.replay import report, restart
from streamrl.replay.admission import AdmissionControl
from streamrl.replay.fates import OnFate
from streamrl.replay.groups import Group
from streamrl.replay.late import LateGroups
from streamrl.replay.lease import LearnerLease, LearnerLeases
from streamrl.replay.lifecycle import Lifecycle
from streamrl.replay.outcome import OutcomeRule
from streamrl.replay.staleness import Horizon, lag
from streamrl.replay.zero_variance import SignalFilter


class ReplayBuffer:
    """``groups_per_step`` is B, the groups consumed per published version; ``n`` the sessions of a group.

    >>> buffer = ReplayBuffer(ReplayConfig(max_staleness=1), groups_per_step=4, n=2)
    >>> buffer.admission(100).slots
    8
    """

    def __init__(
        self,
        config: ReplayConfig,
        *,
        groups_per_step: int,
        n: int,
        group_estimator: bool = True,
        filter_groups: FilterGroups = FilterGroups(),
        clock: Callable[[], float] = time.monotonic,
        on_fate: OnFate | None = None,
    ) -> None:
        self.config = config
        self.n = n
        self.clock = clock
        self.published_version = 0
        self.closed = False
        self.end_of_data = False
        rule = OutcomeRule(n, config.min_sessions, group_estimator, config.max_attempts)
        self.life = Lifecycle(config, rule, SignalFilter(filter_groups, groups_per_step), clock, on_fate)
        self.table, self.ledger, self.breaker = self.life.table, self.life.ledger, self.life.breaker
        self.horizon = Horizon(groups_per_step, config.max_staleness)
        self.learners = LearnerLeases()
        self.late = LateGroups(config, self.table, self.horizon)
        self.next_seq_no = 0
        self.frontier: tuple[int, int] | None = None  # (epoch, position) after the last admitted prompt
        self.trained_unpublished = 0
        self.spent_unpublished = 0  # dropped from batches that were committed: they took a place in a batch, so the next version frees their slots
        self.announced_version = 0  # the number that restored weights will be published under
        self.claims_trained = 0  # claims of committed batches, returned to the horizon at the next publication
        self._admission = AdmissionControl(config.max_staleness, groups_per_step, config.max_inflight_groups)

    # ---- the prompt feeder ------------------------------------------------------------------------------------------------------------

    @property
    def capacity_groups(self) -> int:
        return self._admission.capacity

    @property
    def outstanding(self) -> int:
        """Groups that hold a slot."""
        return len(self.table.groups) + self.trained_unpublished + self.spent_unpublished + self.learners.spent

    @property
    def leasable(self) -> int:
        """Pending groups that may run now. All of them, but after a rollback, when what was admitted since then must not run and grow stale behind it,
        and but for one trial where the breaker holds them back."""
        trials, free = self.breaker.slots(self.clock()), max(0, self.capacity_groups - self.outstanding + self.table.count["pending"])
        return free if trials is None else min(free, trials)

    @property
    def newest_version(self) -> int:
        """No engine can hold a newer one: the trainer is at most one version ahead, or falls back to weights whose number it announced."""
        return max(self.published_version + 1, self.announced_version)

    def admission(self, max_groups: int) -> AdmissionReply:
        """How many groups may be admitted now and, if none, which limit binds."""
        if self.closed or self.end_of_data:
            return AdmissionReply(0, closed=True)
        self.breaker.check()
        inflight = self.table.count["pending"] + self.table.count["running"]
        trials = self.breaker.slots(self.clock())
        if trials is not None and self.table.count["pending"]:
            trials = 0  # one of these is the trial
        return self._admission.slots(max_groups, self.outstanding, inflight, trials)

    def admit(self, prompts: list[Prompt]) -> list[int]:
        """Sequence numbers. A quarantined prompt gets one too and is dropped at once. All or nothing on error."""
        if self.closed or self.end_of_data:
            raise Closed("groups are admitted until the end of the prompts, got more after it; stop the feeder when admission says closed")
        if prompts and self.outstanding + len(prompts) > self.capacity_groups:
            raise ProtocolError(
                f"at most {self.capacity_groups} groups are outstanding, got {len(prompts)} more on top of {self.outstanding}; ask admission() first"
            )
        uids = [check_uid(prompt.uid) for prompt in prompts]
        twice = sorted({uid for uid in uids if uids.count(uid) > 1 or uid in self.table.groups or uid in self.table.ended})
        if twice:
            raise ProtocolError(f"a uid is admitted once, got {twice[:5]} again; the prompt source must name each prompt anew")
        first = self.next_seq_no
        self.next_seq_no += len(prompts)
        for seq_no, prompt in enumerate(prompts, first):
            self.life.admit(prompt, seq_no)
            self.frontier = max(self.frontier or (0, 0), (prompt.epoch, prompt.position + 1))
        return list(range(first, self.next_seq_no))

    def end_of_prompts(self) -> None:
        """No prompt will follow."""
        self.end_of_data = True
        self.table.changes += 1

    # ---- rollout actors ---------------------------------------------------------------------------------------------------------------

    def lease(self, worker: str, max_groups: int) -> LeaseReply:
        """Pending groups in sequence order; ``closed`` when there will never be another."""
        now = self.clock()
        self.life.workers.renew(worker, now)
        leases: list[GroupLease] = []
        for _ in range(min(max_groups, self.leasable, len(self.table.pending))):
            group = self.table.pending.pop()
            self.life.run(group, worker, self.published_version)
            leases.append(GroupLease(group.uid, group.attempt, group.seq_no, group.row, self.n, self.published_version + 1))
        return LeaseReply(leases, closed=not leases and self._no_more_leases())

    def push(self, session: SessionPush) -> bool:
        """Take in a settled session; the last one of the attempt settles the group. False: this very push had arrived before."""
        group = self.life.push(session, self.newest_version)
        if group is not None and group.state in ("running", "ready"):
            self._drop_if_over_age(group)
        return group is not None

    def heartbeat(self, worker: str) -> Heartbeat:
        """Renews the worker's leases; names what it must stop."""
        now = self.clock()
        self.life.workers.renew(worker, now)
        return Heartbeat(self.life.workers.cancelled(worker, now))

    def give_back(self, worker: str, leases: Iterable[tuple[str, int]]) -> None:
        """Orderly return: the groups are issued again with a new attempt that doesn't count as a failed one."""
        for uid, attempt in leases:
            self.life.workers.acknowledge(worker, (uid, attempt))
            group = self.table.groups.get(uid)
            if group is not None and group.state == "running" and group.attempt == attempt and group.worker == worker:
                self.ledger.events["released"] += 1
                self.life.reissue(group)

    def spent(self, worker: str, spent: list[SpentTokens]) -> int:
        """Tokens that ``worker`` had written and no push tells of. Their number."""
        for tokens in spent:
            self.ledger.written.spend(tokens.tokens, "evaluation" if tokens.uid is None else self.table.end_of(tokens.uid))
        return sum(tokens.tokens for tokens in spent)

    def release_worker(self, worker: str) -> int:
        """The worker died. Number of groups that it held."""
        lost = self.life.workers.forget(worker)
        self.life.lose(lost)
        return len(lost)

    # ---- the trainer ------------------------------------------------------------------------------------------------------------------

    def take(self, num_groups: int) -> TakenBatch | None:
        """A learner lease on the ``num_groups`` ready groups with the lowest sequence numbers; None when the batch can't be formed yet.

        Closed when it never can: what is left then ends as dropped(shutdown). BreakerOpen when the breaker has tripped.
        """
        if num_groups < 1:
            raise ProtocolError(f"a batch has at least one group, got num_groups={num_groups}; ask for a positive number")
        self.breaker.check()
        self.life.signal.check()
        self._close_if_exhausted(num_groups)
        if len(self.table.ready) < num_groups or self.late.must_wait(num_groups, self.published_version, self.leasable, self.clock()):
            return None
        groups = [self.table.ready.pop() for _ in range(num_groups)]
        for group in groups:
            self.table.move(group, "leased")
            group.measure(self.published_version)
        self._assert_bound(groups)
        lease = self.learners.grant(groups)
        self.ledger.events["leased"] += num_groups
        self.horizon.claimed += num_groups
        return lease.batch(self.published_version)

    def check_bound(self, lease_id: int) -> list[str]:
        """Drop the leased groups whose lag is above the bound *now*; called before the first optimizer step of the batch. The batch goes on without
        them, so that a group admitted in their place would be consumed one version later than the bound allows: their slots stay taken till then."""
        lease = self.learners.held(lease_id)
        stale = []
        for group in list(lease.groups.values()):
            if group.measure(self.published_version) > self.config.max_staleness:
                stale.append(group.uid)
                del lease.groups[group.uid]
                self.life.drop(group, "stale")
        return stale

    def commit(self, lease_id: int, rejected: Iterable[str] = (), publishes: bool = True) -> None:
        """The leased groups are trained; ``rejected`` ones end as dropped(group_too_small). The next publication frees their slots, or this call where
        none will follow (``publishes`` false). Repeating it changes nothing."""
        if self.learners.has_ended_as(lease_id, "committed"):
            return
        lease = self.learners.held(lease_id)
        refused = set(rejected)
        unknown = sorted(refused - set(lease.groups))
        if unknown:
            raise ProtocolError(f"only groups of the lease can be rejected, got {unknown[:5]} which lease {lease_id} doesn't hold; pass uids of its batch")
        for group in lease.groups.values():
            if group.uid in refused:
                self.life.drop(group, "group_too_small")
            else:
                self.life.train(group, published=not publishes)
        if publishes:
            trained = len(lease.groups) - len(refused)
            self.trained_unpublished += trained
            self.spent_unpublished += lease.size - trained
            self.claims_trained += lease.size
        else:
            self.horizon.claimed -= lease.size
        self.learners.end(lease, "committed")

    def skip(self, lease_id: int) -> None:
        """No optimizer step was applied: the groups end as dropped(skipped_step) and their slots are free at once."""
        if self.learners.has_ended_as(lease_id, "skipped"):
            return
        lease = self.learners.held(lease_id)
        for group in lease.groups.values():
            self.life.drop(group, "skipped_step")
        self.horizon.claimed -= lease.size
        self.learners.end(lease, "skipped")

    def abandon(self, lease_id: int) -> None:
        """The learner gave up: the groups are ready again, in their old order."""
        if not self.learners.has_ended_as(lease_id, "abandoned"):
            self._give_up(self.learners.held(lease_id))

    def published(self, version: int) -> None:
        """All serving replicas hold ``version``: frees the slots of what was trained into it and drops what is now too old. Repeating it changes nothing."""
        waits = self.trained_unpublished + self.spent_unpublished
        if version < self.published_version or (version == self.published_version and waits):
            raise ProtocolError(f"published versions only grow, got version {version} after {self.published_version}; publish each version once")
        if version == self.published_version:
            return
        self.trained_unpublished = self.spent_unpublished = 0
        self.return_claims()
        self.published_version = version
        self.life.garbage.release_trained()
        self.life.provisional.publish()
        self.table.changes += 1
        self._drop_over_age()

    # ---- restarts: of the learner, of this process, of the whole run ---------------------------------------------------------------------

    def new_learner(self) -> int:
        """Another incarnation of the learner: what the last one held is ready again, and its commits are refused. Number of leases."""
        held = self.learners.all_held()
        for lease in held:
            self._give_up(lease)
        return len(held)

    def checkpointed(self, mark: int) -> None:
        """The checkpoint whose snapshot has this ``mark`` is complete: what was trained before it is final."""
        self.life.let_go(self.life.provisional.finish(mark))

    def rollback(self, mark: int | None = None, version: int | None = None) -> int:
        """The learner went back to the checkpoint with this ``mark`` (None: the newest one); its weights will be published as ``version`` (None: the
        next one). Number of groups whose update is lost."""
        return restart.roll_back(self, mark, version)

    def give_up(self, uids: Iterable[str]) -> int:
        """Rows of these trained groups can't be kept until a checkpoint: they may be freed. Number of groups."""
        return restart.give_up(self, set(uids))

    def forget_missing(self, keys: Iterable[str]) -> int:
        """The store has lost these rows: their groups are generated again. Number of groups."""
        return restart.forget_missing(self, set(keys))

    def restarted(self) -> int:
        """All rollout actors are new ones: what the old ones held is issued again. Number of groups."""
        return restart.forget_workers(self)

    def recovered(self) -> None:
        """This process is a new one and all others went on: they get time to be heard, and unconfirmed keys are cleared again."""
        self.life.workers.go_on(self.clock())
        self.life.garbage.ask_again()
        self.table.changes += 1

    def snapshot(self) -> ReplaySnapshot:
        """Untrained groups and totals. Take it after the commit of the batch that the checkpoint contains."""
        return restart.snapshot(self)

    def restore(self, snapshot: ReplaySnapshot) -> None:
        """Continue a run in an empty buffer: groups are pending with attempt + 1 and their old sequence number; totals go on."""
        restart.restore(self, snapshot)

    def return_claims(self) -> None:
        """Batches that were committed no longer stand before the next publication."""
        self.horizon.claimed -= self.claims_trained
        self.claims_trained = 0

    # ---- time, end, counts --------------------------------------------------------------------------------------------------------------

    def expire(self) -> int:
        """Act on what ran out: leases of silent workers, groups that sampling has waited for too long. Number of groups touched."""
        now = self.clock()
        lost = self.life.workers.expire(now)
        self.life.lose(lost)
        late = [group for group in self.late.groups() if self.late.until(group) <= now]
        for group in late:
            self.life.drop(group, "stale")
        return len(lost) + len(late)

    def next_deadline(self) -> float | None:
        """Clock time at which something changes by itself; None when nothing will."""
        late = [self.late.until(group) for group in self.late.groups()]
        times = [self.life.workers.next_deadline(), self.breaker.next_deadline(self.clock()), *late]
        return min((t for t in times if t is not None), default=None)

    def close(self) -> None:
        """Orderly end: nothing is admitted, leased or taken any more. A learner may still commit what it holds."""
        if not self.closed:
            self.closed = self.end_of_data = True
            self._drop_all("shutdown")
            self.life.provisional.retains = False
            self.life.let_go(self.life.provisional.over_budget())
            self.table.changes += 1

    def stats(self) -> ReplayStats:
        """Counts at this instant."""
        return report.stats(self)

    def take_timeout(self, num_groups: int, wait_s: float) -> TakeTimeout:
        """The error of a take that ran out of time: counts, oldest groups in flight, and what blocks."""
        return report.take_timeout(self, num_groups, wait_s)

    def collect_garbage(self) -> list[str]:
        """Keys of rows (and uids of ended groups) that the host must clear. Groups about to be issued again aren't leased until
        ``garbage_cleared(keys)``, so that their next rows can't be taken for the old ones."""
        return self.life.collect_garbage()

    def garbage_cleared(self, keys: Iterable[str]) -> None:
        """The store has freed ``keys``."""
        self.life.garbage_cleared(keys)

    # ---- staleness and end of data ------------------------------------------------------------------------------------------------------

    def _drop_over_age(self) -> None:
        """After a publication: ready groups above the bound are stale, running ones doomed."""
        for group in self.table.in_state("ready") + self.table.in_state("running"):
            self._drop_if_over_age(group)

    def _drop_if_over_age(self, group: Group) -> None:
        if lag(self.published_version, group.oldest_version) > self.config.max_staleness:
            self.life.drop(group, "stale" if group.state == "ready" else "doomed")

    def _give_up(self, lease: LearnerLease) -> None:
        self.ledger.events["released"] += len(lease.groups)
        for group in lease.groups.values():
            self.table.move(group, "ready")
        self.horizon.claimed -= lease.size
        self.learners.end(lease, "abandoned")
        self._drop_over_age()
        if self.closed:
            self._drop_all("shutdown")

    def _assert_bound(self, groups: list[Group]) -> None:
        over = {group.uid: group.lag for group in groups if group.lag > self.config.max_staleness}
        if over:
            self.ledger.staleness_violations += len(over)
            raise ProtocolError(f"no group above max_staleness={self.config.max_staleness} is taken, got lags {over}; this is a bug of the replay buffer")

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
                self.life.drop(group, reason)

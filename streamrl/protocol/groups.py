"""Messages between the replay buffer and those who use it. The buffer alone owns group state, leases and the ledger."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from streamrl.protocol.meta import KVBatchMeta

GroupState = Literal["pending", "running", "ready", "leased", "trained", "dropped"]
Outcome = Literal["complete", "partial", "failed"]
DropReason = Literal[
    "quarantined",
    "loop_error",
    "engine_error",
    "env_error",
    "reward_error",
    "session_timeout",
    "empty_output",
    "overlong",
    "lease_expired",
    "doomed",
    "stale",
    "zero_variance",
    "group_too_small",
    "skipped_step",
    "shutdown",
    "cancelled",
]
DROP_REASONS: tuple[str, ...] = get_args(DropReason)  # in order of precedence
BUFFER_EVENTS: tuple[str, ...] = ("inserted", "leased", "consumed", "released", "expired")
WASTES: dict[str, str] = {  # token fates of what is not trained, by reason; every other reason is a failure
    "stale": "stale",
    "doomed": "stale",
    "zero_variance": "filtered",
    "group_too_small": "filtered",
    "evaluation": "evaluation",
    "shutdown": "in_flight",  # no fault and no choice: the run ended before they did
}
AdmissionReason = Literal["staleness_bound", "buffer_full", "inflight_limit", "weight_sync", "breaker"]


class GroupLease(msgspec.Struct, frozen=True):
    """Permission to generate one group: n sessions of ``row``, under this attempt. Writes carry (uid, attempt)."""

    uid: str
    attempt: int  # 1-based; a push of an older attempt is refused
    seq_no: int  # admission order, the tie-break everywhere
    row: dict[str, Any]
    n: int
    global_steps: int  # learner step at the time of the lease


class LeaseReply(msgspec.Struct, frozen=True):
    """``leases`` is empty when the wait ran out; ``closed`` says that there will never be another."""

    leases: list[GroupLease]
    closed: bool = False


class AdmissionReply(msgspec.Struct, frozen=True):
    """``slots`` groups may be admitted now (0: the wait ran out); ``reason``: what the call waited for, None when for nothing; ``closed``: never again."""

    slots: int
    reason: AdmissionReason | None = None
    closed: bool = False


class SessionPush(msgspec.Struct, frozen=True):
    """One settled session. Its rows are already in the store under ``keys``; a failed session has no keys and a reason."""

    uid: str
    attempt: int
    session_id: int
    keys: list[str] = []
    tags: list[dict[str, Any]] = []  # one per key: prompt_len, response_len, seq_len, min_global_steps, max_global_steps
    reason: str | None = None  # a drop reason; None = the session is good
    retryable: bool = True
    scores: dict[str, float] = {}  # seq_final_reward and numeric reward_extra_info of the last row, for filters and metrics
    written_tokens: int | None = None  # tokens of the rows that the policy wrote; None: all response tokens
    lost_tokens: int = 0  # that it wrote for the session and no row holds: of failed tries, of a failed session


class SpentTokens(msgspec.Struct, frozen=True):
    """Tokens that the policy wrote and that no push will tell of. ``uid`` None: of an evaluation; else of a group that was taken away from its worker,
    whose fate they share."""

    tokens: int
    uid: str | None = None


class Heartbeat(msgspec.Struct, frozen=True):
    """What a rollout actor must stop: leases that were cancelled or taken away, as (uid, attempt)."""

    cancel: list[tuple[str, int]] = []


class TakenBatch(msgspec.Struct):
    """A learner lease: whole groups in seq_no order, rows inside by (session_id, index)."""

    lease_id: int
    meta: KVBatchMeta
    uids: list[str]
    lags: list[int]  # per group: published version - oldest version, at the take
    published_version: int


class ReplayStats(msgspec.Struct, kw_only=True):
    """Counts at one instant. The ledger closes: admitted = trained + dropped + pending + running + ready + leased."""

    published_version: int = 0
    pending: int = 0
    running: int = 0
    ready: int = 0
    leased: int = 0
    trained_unpublished: int = 0
    outstanding: int = 0
    capacity_groups: int = 0
    admitted: int = 0
    trained: int = 0
    dropped: dict[str, int] = {}
    trajectories_generated: int = 0
    trajectories_trained: int = 0
    trajectories_dropped: dict[str, int] = {}
    tokens_generated: int = 0  # response tokens of acknowledged rows
    tokens_trained: int = 0
    tokens_dropped: dict[str, int] = {}
    expired_leases: int = 0
    rejected_writes: int = 0
    oldest_group_age_s: float = 0.0
    blocked_by: str | None = None
    partial_trained: int = 0  # trained groups in which a session had failed
    lag_sum: int = 0  # over trained groups
    lag_max: int = 0
    rolled_back: int = 0  # trained groups whose update was lost with the learner; ``trained`` does not count them
    trajectories_rolled_back: int = 0
    tokens_rolled_back: int = 0
    spent_unpublished: int = 0  # slots of groups that were dropped from a batch, until the version trained from the rest of it is published
    zero_variance: dict[str, float] = {}  # by data source: share of groups without a signal among those judged last
    admission_blocked: str | None = None  # the AdmissionReason that keeps the next group out; None: a slot is free, or none will ever be again
    events: dict[str, int] = {}  # of BUFFER_EVENTS, but for "inserted", "consumed" and "expired", which other totals are
    staleness_violations: int = 0
    generated_tokens: int = 0  # that the policy wrote, observations left out; evaluations and failed sessions counted
    token_fates: dict[str, int] = {}  # where they ended: trained, stale, filtered, failed, evaluation
    tokens_in_flight: int = 0  # generated = all fates + in flight
    generated_tokens_rolled_back: int = 0  # taken out of ``trained`` again


class SavedGroup(msgspec.Struct, frozen=True):
    """A group that a checkpoint must not lose: admitted, not trained."""

    uid: str
    seq_no: int
    attempt: int
    row: dict[str, Any]


class ReplaySnapshot(msgspec.Struct, kw_only=True):
    """What a restart needs: untrained groups (to be generated again with attempt + 1 and the same seq_no) and the ledger totals."""

    published_version: int
    next_seq_no: int
    groups: list[SavedGroup]
    stats: ReplayStats
    quarantine: list[str] = []
    frontier: tuple[int, int] | None = None  # (epoch, position) after the last admitted prompt: where the data goes on
    mark: int = 0  # groups trained before it, rolled back ones left out: names the checkpoint to ``checkpointed`` and ``rollback``

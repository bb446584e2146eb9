"""Every seam of the house. A loop takes these Protocols and cannot tell whether the other side is an object, an actor or a script.

Waiting: methods with ``wait_s`` return (or raise the named error) by then; nothing waits without a limit. Remote calls add their own deadline.
"""

from __future__ import annotations

from typing import Any, Protocol

from streamrl.protocol.generate import GenerateRequest, GenerateResult
from streamrl.protocol.groups import AdmissionReply, GroupLease, Heartbeat, LeaseReply, ReplaySnapshot, ReplayStats, SessionPush, SpentTokens, TakenBatch
from streamrl.protocol.learn import StageReport, StepUpdates, UpdateReport, UpdateWork
from streamrl.protocol.meta import KVBatchMeta
from streamrl.protocol.trajectory import Prompt, Trajectory
from streamrl.protocol.validation import ValQuestion, ValResult
from streamrl.protocol.weights import Probe, WeightManifest, WeightReport


class Clock(Protocol):
    """Time, so that tests need no sleeping."""

    def now(self) -> float:
        """Monotonic seconds."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class Generate(Protocol):
    """All an agent loop sees of an engine."""

    async def __call__(self, request: GenerateRequest) -> GenerateResult: ...


class Engine(Protocol):
    """One engine replica. ``version`` is the weight version that a request started now would use."""

    version: int
    has_request_seeds: bool

    async def start(self) -> None: ...
    async def generate(self, request: GenerateRequest) -> GenerateResult: ...
    async def abort(self, request_ids: list[str] | None = None) -> int:
        """End running requests (None: all); their callers get ``stop_reason="abort"`` with the tokens so far. Unknown ids are not counted."""
        ...

    async def update_weights(self, manifest: WeightManifest) -> WeightReport:
        """Pause keeping running sequences, load, verify by hash, set the version, resume, compare the probe. WeightMismatch names the tensor."""
        ...

    async def score(self, token_ids: list[int]) -> list[float]:
        """Log-prob of each token but the first, under the current weights at temperature 1."""
        ...

    def check(self) -> None:
        """EngineError when the engine can generate no more; its actor is then replaced."""
        ...

    def tokens_under_way(self) -> int | None:
        """Tokens that the running requests have so far, as a sign of life; None: none runs, or the engine cannot tell."""
        ...

    def child_pids(self) -> list[int]: ...
    async def stop(self) -> None: ...


class PromptSource(Protocol):
    """Dataset rows as named prompts. The cursor moves through ``next_prompts``; the replay buffer knows how far it was admitted."""

    async def next_prompts(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts; fewer only at the end of the data (empty: no more)."""
        ...

    async def num_prompts(self) -> int:
        """Training prompts of one epoch, after filters."""
        ...

    async def validation_rows(self) -> list[dict[str, Any]]: ...
    async def state(self) -> dict[str, Any]:
        """The cursor (``epoch``, ``position``) and what its meaning depends on, msgpack-able."""
        ...

    async def restore(self, state: dict[str, Any]) -> None:
        """Continue at ``state``; a position at the end of an epoch is the start of the next. CheckpointError for other data."""
        ...


class Admission(Protocol):
    """The replay buffer as the prompt feeder sees it."""

    async def admission(self, max_groups: int, wait_s: float) -> AdmissionReply: ...
    async def admit(self, prompts: list[Prompt]) -> list[int]:
        """Sequence numbers. ProtocolError when more than the free slots, or a uid twice."""
        ...

    async def end_of_prompts(self) -> None:
        """No prompt will follow; takers get what is left, then Closed."""
        ...


class LeaseSource(Protocol):
    """The replay buffer as a rollout actor sees it."""

    async def lease(self, worker: str, max_groups: int, wait_s: float) -> LeaseReply: ...
    async def push(self, session: SessionPush) -> bool:
        """True when accepted; StaleWrite for an old attempt or an ended group. The last session of the attempt settles the group."""
        ...

    async def heartbeat(self, worker: str) -> Heartbeat: ...
    async def give_back(self, worker: str, leases: list[tuple[str, int]]) -> None: ...
    async def spent(self, worker: str, spent: list[SpentTokens]) -> int:
        """Tokens that the policy wrote and that no push tells of: of evaluations, and of groups that were taken away. Their number."""
        ...


class BatchSource(Protocol):
    """The replay buffer as the trainer sees it."""

    async def take(self, num_groups: int, wait_s: float) -> TakenBatch:
        """A learner lease on whole groups within the staleness bound; TakeTimeout says what blocks, Closed that nothing will come."""
        ...

    async def check_bound(self, lease_id: int) -> list[str]:
        """The uids whose lag is above the bound *now*; they are dropped(stale) and must leave the batch. Called before the first optimizer step."""
        ...

    async def commit(self, lease_id: int, rejected: list[str], publishes: bool = True) -> None:
        """The leased groups are trained; ``rejected`` uids end as dropped(group_too_small). Their slots are freed by the next publication, or at once
        when this step makes no version (``publishes`` false). Idempotent. LeaseExpired for an older incarnation."""
        ...

    async def skip(self, lease_id: int) -> None:
        """No optimizer step was applied: the groups end as dropped(skipped_step)."""
        ...

    async def abandon(self, lease_id: int) -> None: ...
    async def published(self, version: int) -> None:
        """All serving replicas hold ``version``: frees the slots of what was trained into it. Versions only grow."""
        ...

    async def new_learner(self) -> int:
        """Another incarnation of the learner: what the last one held is ready again. Number of leases that ended."""
        ...

    async def checkpointed(self, mark: int) -> None:
        """The checkpoint with the snapshot of this ``mark`` is complete: what was trained before it is final."""
        ...

    async def rollback(self, mark: int | None, version: int | None) -> int:
        """The learner went back to the checkpoint with this ``mark`` (None: the newest): what was trained since lives again. Its weights will be
        published as ``version`` (None: the next one). Number of groups."""
        ...

    async def snapshot(self) -> ReplaySnapshot: ...
    async def restore(self, snapshot: ReplaySnapshot) -> None:
        """The whole run was started again. The frontier may be beyond the snapshot's: ask for a new one before feeding."""
        ...

    async def stats(self) -> ReplayStats: ...
    async def release_worker(self, worker: str) -> int:
        """A rollout actor died: its leases go back to pending with attempt + 1. Number of groups."""
        ...

    async def close(self) -> None: ...


class Replay(Admission, LeaseSource, BatchSource, Protocol):
    """Everything the replay buffer offers."""


class TrajectoryStore(Protocol):
    """The store as a rollout actor sees it: rows in. Learner ranks read columns, the replay buffer frees rows, through ``streamrl.dataplane``."""

    async def put_trajectories(self, rows: list[Trajectory], tags: list[dict[str, Any]]) -> None:
        """Write the rows of one session and their tags in one atomic put. StoreFull after the put deadline."""
        ...


class SessionRunner(Protocol):
    """Runs one session of a group: chat template, agent loop, reward."""

    async def start(self) -> None:
        """Start what scores the sessions, such as a judge's engine."""
        ...

    def check(self) -> None:
        """EngineError when that can go on no more."""
        ...

    def child_pids(self) -> list[int]: ...
    async def run(self, lease: GroupLease, session_id: int, retry: int) -> list[Trajectory]:
        """Rows with rewards, or without where the learner scores them; SessionFailed with a drop reason otherwise."""
        ...

    async def evaluate(self, questions: list[ValQuestion]) -> list[ValResult]:
        """Sessions as validation samples them, scored; one result per question, in order."""
        ...

    async def close(self) -> None: ...


class Learner(Protocol):
    """One learner rank. All ranks are called together, in one order; each call is a collective."""

    def rm_scores(self, share: KVBatchMeta) -> StageReport:
        """Writes ``rm_scores`` and ``reward_extra_info`` of rows that came without a reward, as the reward model judges them."""
        ...

    def log_probs(self, share: KVBatchMeta) -> StageReport:
        """Writes ``old_log_probs``, ``entropy`` and what else the estimator needs of the scoring pass; in bypass mode a copy of ``rollout_log_probs``."""
        ...

    def ref_log_probs(self, share: KVBatchMeta) -> StageReport:
        """Writes ``ref_log_prob`` of the share's rows, under the frozen starting model. Called only when a KL needs it."""
        ...

    def values(self, share: KVBatchMeta) -> StageReport:
        """Writes ``values`` of the share's rows, by the critic as it is now. Called only when there is one."""
        ...

    def advantages(self, batch: KVBatchMeta) -> StageReport:
        """Rank 0, whole batch: writes ``advantages``, ``returns``, ``token_level_rewards``, ``loss_mask``, ``session_weight`` and
        ``rollout_is_weights``."""
        ...

    def update_critic(self, work: UpdateWork) -> UpdateReport: ...
    def update(self, work: UpdateWork) -> UpdateReport:
        """Of the policy."""
        ...

    def last_updates(self) -> StepUpdates | None:
        """What this process finished of the newest step; None before the first. No collective."""
        ...

    def snapshot(self, version: int) -> WeightManifest | None:
        """Rank 0 returns the manifest, the others None."""
        ...

    def probe(self) -> Probe | None: ...
    def stage(self) -> None:
        """Keep what the next ``save`` shall write, as it is now."""
        ...

    def save(self, folder: str) -> None:
        """Write what was staged. Beside other calls, if ``actor.checkpoint.async_save``. CheckpointError on all ranks when one of them could not."""
        ...

    def load(self, folder: str) -> None: ...


class LearnerGroup(Protocol):
    """All learner ranks as the trainer sees them: metadata goes out, light metrics come back."""

    ranks: int

    async def rm_scores(self, shares: list[KVBatchMeta]) -> StageReport: ...
    async def log_probs(self, shares: list[KVBatchMeta]) -> StageReport: ...
    async def ref_log_probs(self, shares: list[KVBatchMeta]) -> StageReport: ...
    async def values(self, shares: list[KVBatchMeta]) -> StageReport: ...
    async def advantages(self, batch: KVBatchMeta) -> StageReport: ...
    async def update_critic(self, works: list[UpdateWork]) -> UpdateReport: ...
    async def update(self, works: list[UpdateWork]) -> UpdateReport: ...
    async def last_updates(self) -> StepUpdates | None:
        """Answered after an update that is under way."""
        ...

    async def snapshot(self, version: int) -> WeightManifest: ...
    async def stage(self) -> None: ...
    async def save(self, folder: str) -> None: ...
    async def load(self, folder: str) -> None: ...


class Replica(Protocol):
    """One serving engine as the publisher sees it."""

    name: str

    async def update_weights(self, manifest: WeightManifest) -> WeightReport: ...
    async def evaluate(self, questions: list[ValQuestion], alone: bool = False) -> list[ValResult]:
        """``alone``: no group is leased meanwhile, since its rows would grow too old."""
        ...

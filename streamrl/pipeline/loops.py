"""The table of contents: every loop that runs in a streamrl job, as a plain async function over small Protocols.

    PromptSource ──next_prompts──► feed_prompts ──admit──► Replay ──lease──► generate_groups ──push──► Replay ──take──► Trainer.run
                                        ▲                    │                    │   ▲                                     │
                                        └── admission slots ─┘                    │   └──── update_weights ◄── publish ◄────┤
                                             (freed by published)                 └── rows ──► TrajectoryStore ──columns──► learner ranks

    loop               consumes            produces                 waits for                           unblocked by
    feed_prompts       dataset rows        admitted groups          an admission slot                   a publication, or a dropped group
    generate_groups    group leases        rows and settled groups  a lease; a free session slot        an admitted group; a session's end
    keep_leases        nothing             heartbeats               the next beat                       the clock
    Trainer.run        complete groups     weight versions          a batch; the last publication       the last session of its groups; replicas
    WeightPublisher    a snapshot          acknowledgements         each replica's verified load        the replica, or its deadline

Every wait has a limit. A loop ends when the other side says ``closed``, or when its task is cancelled; nothing else ends it in order.
The same functions run in one process (``pipeline/local.py``) and in Ray actors (``actors/``); they know of neither.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from streamrl.config.rollout import DataplaneConfig, ReplayConfig, Timeouts
from streamrl.errors import SessionFailed, StaleWrite, StreamrlError
from streamrl.pipeline.metering import RolloutMeter
from streamrl.pipeline.spending import SpentReport
from streamrl.protocol.fields import NODE_TAG, trajectory_tag
from streamrl.protocol.groups import GroupLease, SessionPush
from streamrl.protocol.interfaces import Admission, Clock, LeaseSource, PromptSource, SessionRunner, TrajectoryStore
from streamrl.protocol.spending import Spending, counted
from streamrl.protocol.topic import Topic
from streamrl.protocol.trajectory import Trajectory
from streamrl.protocol.waits import WaitTable, shown
from streamrl.replay.zero_variance import env_of
from streamrl.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

POLL_S = 5.0  # how long one lease or admission call waits before it is asked again: the longest time a silent peer goes unnoticed
LAST_WORD_S = 2.0  # for the report of a worker that ends: whoever ends it waits no longer


async def feed_prompts(
    prompts: PromptSource, replay: Admission, *, chunk: int, waits: WaitTable, metrics: Metrics, limit_s: float = ReplayConfig().take_timeout_s
) -> None:
    """Consumes dataset rows; produces admitted groups; waits for an admission slot; unblocked by a publication or a dropped group.

    At most ``chunk`` prompts are in hand at once, and each is admitted before the next is drawn: a prompt that was handed out is
    either known to the replay buffer or will be handed out again after a restart. ``limit_s``: after it the trainer's wait ends the run.
    """
    admission, began, waited_for = waits.polling("an admission slot", "replay", limit_s), time.monotonic(), None
    while True:
        with admission.turn(), metrics.state("wait_admission"):
            reply = await replay.admission(chunk, POLL_S)
        waited_for = waited_for or reply.reason
        if reply.closed:
            return
        if not reply.slots:
            continue
        admission.served()
        if waited_for is not None:
            metrics.observe("streamrl_admission_wait_seconds", time.monotonic() - began, reason=waited_for)
        with waits.waiting("the next prompts", "data", limit_s):
            batch = await prompts.next_prompts(reply.slots)
        if batch:
            await replay.admit(batch)
        began, waited_for = time.monotonic(), None
        if len(batch) < reply.slots:
            log.info("the data has ended: no further prompt will be admitted")
            await replay.end_of_prompts()
            return


class LeaseGate:
    """Open but within ``closed``: then no group is leased, and those that run go on."""

    def __init__(self) -> None:
        self._closers = 0
        self._closed_at = 0.0
        self._opening = Topic()

    @property
    def is_closed(self) -> bool:
        return self._closers > 0

    @property
    def closed_s(self) -> float | None:
        """For how long it has been closed; None while it is open."""
        return time.monotonic() - self._closed_at if self.is_closed else None

    @contextmanager
    def closed(self) -> Iterator[None]:
        self._closed_at = self._closed_at if self.is_closed else time.monotonic()
        self._closers += 1
        try:
            yield
        finally:
            self._closers -= 1
            self._opening.wake()

    async def opened(self, wait_s: float) -> None:
        """Returns when the gate is open, or after ``wait_s``."""
        if self.is_closed:
            await self._opening.wait_until(asyncio.get_running_loop().time() + wait_s)


class GroupWorker:
    """What ``generate_groups`` and ``keep_leases`` of one rollout actor share: its name, its slots and its running groups."""

    def __init__(
        self,
        name: str,
        *,
        replay: LeaseSource,
        store: TrajectoryStore,
        runner: SessionRunner,
        slots: int,
        session_retries: int,
        check_engine: Callable[[], None],
        waits: WaitTable,
        metrics: Metrics,
        node: str | None = None,
        gate: LeaseGate | None = None,
        min_sessions: int = 1,
        spent: SpentReport | None = None,
        lease_limit_s: float = ReplayConfig().take_timeout_s,
        session_limit_s: float = Timeouts().session_s,
        put_limit_s: float = DataplaneConfig().put_timeout_s,
    ) -> None:
        self.name = name
        self.replay = replay
        self.store = store
        self.runner = runner
        self.slots = slots
        self.session_retries = session_retries
        self.check_engine = check_engine
        self.waits = waits
        self.metrics = metrics
        self.node = node  # where its rows are, if a run has several nodes
        self.gate = gate or LeaseGate()
        self.min_sessions = min_sessions  # good ones that make a group worth training
        self.spent = spent or SpentReport(replay, name)
        self.meter = RolloutMeter(metrics)
        self.put_limit_s = put_limit_s
        self.leases = waits.polling("a group to generate", "replay", lease_limit_s)  # after it the trainer's wait ends the run
        self.free_slot = waits.polling("a free session slot", "its sessions", session_limit_s)  # the longest that a session may hold one
        self.groups: dict[tuple[str, int], asyncio.Task[None]] = {}
        self.sessions = 0
        metrics.set("streamrl_rollout_session_capacity", slots)
        metrics.set("streamrl_rollout_sessions_in_flight", 0)

    def free_groups(self, n: int) -> int:
        """How many groups of n sessions fit; a group larger than all slots runs alone."""
        if not self.groups:
            return max(1, self.slots // n)
        return max(0, (self.slots - self.sessions) // n)


async def generate_groups(worker: GroupWorker, *, n: int) -> None:
    """Consumes group leases; produces rows and settled groups; waits for a lease or a free slot; unblocked by an admitted group or
    a session's end. An error that is not a session's own (a full store, a dead peer) ends the loop and thereby the actor."""
    try:
        while True:
            free = 0 if worker.gate.is_closed else worker.free_groups(n)
            if not free:
                await _first_to_end(worker)
                continue
            with worker.leases.turn(), worker.metrics.state("wait_admission"):
                reply = await worker.replay.lease(worker.name, free, POLL_S)
            if worker.gate.is_closed and reply.leases:  # closed while this was on its way
                await worker.replay.give_back(worker.name, [(lease.uid, lease.attempt) for lease in reply.leases])
                continue
            if reply.leases:
                worker.leases.served()
            for lease in reply.leases:
                _start(worker, lease)
            _raise_failures(worker)
            if reply.closed:
                return
    finally:
        await cancel_all(worker.groups.values())
        await tell_the_rest(worker)


async def tell_the_rest(worker: GroupWorker) -> None:
    """What stopped sessions had written, so that the books of the run know of it; a buffer that is gone can't be told. Whoever stops the engine calls it
    again then: what sessions had left behind has ended too."""
    try:
        async with asyncio.timeout(LAST_WORD_S):
            await worker.spent.hand_over()
    except (StreamrlError, TimeoutError) as error:
        log.warning("the tokens of the last sessions of %s are in no books: %s", worker.name, error)


async def keep_leases(worker: GroupWorker, config: ReplayConfig, clock: Clock) -> None:
    """Produces heartbeats; waits for the next beat. Stops the groups that were taken away from this worker, so that no engine time
    goes into rows nobody will accept. An engine that broke ends the loop, and thereby the actor, also while no session runs on it."""
    while True:
        worker.check_engine()
        with worker.waits.row("the answer to a heartbeat", "replay", time.time(), config.lease_s):  # after it the leases are lost
            reply = await worker.replay.heartbeat(worker.name)
        for lease in reply.cancel:
            task = worker.groups.get((lease[0], lease[1]))
            if task is not None:
                log.info("group %s (attempt %d) was taken away; stopping it", *lease)
                task.cancel()
        await worker.spent.hand_over()
        await clock.sleep(config.heartbeat_s)


async def generate_group(worker: GroupWorker, lease: GroupLease) -> None:
    """All n sessions of one group, side by side. A refused push (the group has ended, or another attempt runs) stops the rest."""
    outcome, tasks = "cancelled", []
    try:
        async with asyncio.TaskGroup() as sessions:
            for session_id in range(lease.n):
                tasks.append(sessions.create_task(generate_session(worker, lease, session_id)))
        good = sum(task.result() for task in tasks)
        outcome = "complete" if good == lease.n else "partial" if good >= worker.min_sessions else "failed"
    except* StaleWrite as refused:
        log.info("group %s (attempt %d) is no longer ours: %s", lease.uid, lease.attempt, refused.exceptions[0])
    finally:
        worker.meter.group(env_of(lease.row), outcome)


async def generate_session(worker: GroupWorker, lease: GroupLease, session_id: int) -> bool:
    """One session to its end: run with retries, rows into the store in one put, then one push of keys and tags. Whether it is a good one."""
    taken_away = partial(worker.spent.taken_away, lease.uid)
    with worker.waits.activity(f"{lease.uid}/{session_id}", rare=False), counted(late=taken_away) as tokens:
        try:
            return await _run_session(worker, lease, session_id, tokens)
        except (StaleWrite, asyncio.CancelledError):
            worker.meter.lost(env_of(lease.row), "cancelled")
            raise
        finally:
            taken_away(tokens.take())
            worker.spent.evaluated(tokens.evaluation)


async def _run_session(worker: GroupWorker, lease: GroupLease, session_id: int, tokens: Spending) -> bool:
    rows: list[Trajectory] = []
    failure: SessionFailed | None = None
    seconds = 0.0
    for retry in range(worker.session_retries + 1):
        began = time.monotonic()
        try:
            with shown("its end", "its session"):
                rows, failure = await worker.runner.run(lease, session_id, retry), None
            seconds = time.monotonic() - began
            break
        except SessionFailed as error:
            failure = error
            log.warning("session %s/%d failed (%s): %s", lease.uid, session_id, error.reason, error)
            if error.reason == "engine_error":
                worker.check_engine()  # a broken engine ends this actor, not one session after another
            if not error.retryable:
                break
    if failure is None:
        await _deliver(worker, lease, session_id, rows, tokens)
        worker.meter.session(env_of(lease.row), rows, seconds)
        return True
    reason, lost = failure.reason, tokens.take()
    await _push(worker, SessionPush(lease.uid, lease.attempt, session_id, reason=reason, retryable=failure.retryable, lost_tokens=lost), tokens)
    worker.meter.lost(env_of(lease.row), "failed")
    return False


async def _deliver(worker: GroupWorker, lease: GroupLease, session_id: int, rows: list[Trajectory], tokens: Spending) -> None:
    """Acknowledged means: bytes in the segment, columns in the index, then the push. The order is why no key without data is pushed.
    The rows of a refused push are the replay buffer's to clear: it knows whether another attempt has written the same keys since."""
    tags = [trajectory_tag(row, lease.attempt, lease.seq_no, lease.global_steps) for row in rows]
    if worker.node is not None:
        tags = [tag | {NODE_TAG: worker.node} for tag in tags]
    keys = [str(row.key) for row in rows]
    with shown("room for its rows", "store", worker.put_limit_s):
        await worker.store.put_trajectories(rows, tags)
    written = sum(sum(row.response_mask) for row in rows)
    lost = max(0, tokens.take() - written)
    push = SessionPush(lease.uid, lease.attempt, session_id, keys, tags, scores=_scores(rows[-1]), written_tokens=written, lost_tokens=lost)
    with shown("its push", "replay"):
        await _push(worker, push, tokens)


async def _push(worker: GroupWorker, push: SessionPush, tokens: Spending) -> None:
    """The tokens of a refused push are as unaccounted for as before it."""
    try:
        await worker.replay.push(push)
    except (StaleWrite, asyncio.CancelledError):
        tokens.add((push.written_tokens or 0) + push.lost_tokens)
        raise


def _scores(last: Trajectory) -> dict[str, float]:
    """What group filters may look at: the final reward and the scorer's numbers, of the session's last row."""
    scores = {name: float(value) for name, value in last.reward_extra.items() if isinstance(value, int | float)}
    if last.reward is not None:
        scores["seq_final_reward"] = last.reward
    return scores


def _start(worker: GroupWorker, lease: GroupLease) -> None:
    task = asyncio.create_task(generate_group(worker, lease), name=f"group {lease.uid}")
    worker.groups[lease.uid, lease.attempt] = task
    worker.sessions += lease.n
    worker.metrics.set("streamrl_rollout_sessions_in_flight", worker.sessions)

    def ended(_: asyncio.Task[None]) -> None:
        worker.sessions -= lease.n
        worker.metrics.set("streamrl_rollout_sessions_in_flight", worker.sessions)

    task.add_done_callback(ended)


async def _first_to_end(worker: GroupWorker) -> None:
    """Until a group has ended or the gate is open again."""
    opened = [asyncio.create_task(worker.gate.opened(POLL_S))] if worker.gate.is_closed else []
    try:
        with worker.free_slot.turn():
            done, _ = await asyncio.wait([*worker.groups.values(), *opened], timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        if done - set(opened) or (opened and not worker.gate.is_closed):
            worker.free_slot.served()
    finally:
        await cancel_all(opened)
    _raise_failures(worker)


def _raise_failures(worker: GroupWorker) -> None:
    """Forget the groups that have ended; the first one that ended badly ends the loop with its own error."""
    for lease, task in list(worker.groups.items()):
        if task.done():
            del worker.groups[lease]
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error.exceptions[0] if isinstance(error, ExceptionGroup) else error


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their ends; their errors were reported where they mattered."""
    pending = list(tasks)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)

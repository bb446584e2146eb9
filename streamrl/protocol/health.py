"""What an actor says when it is asked how it is: its waits, what it got done, and the facts that only its kind knows.

Plain counts and names; no rows, no tokens. Times are unix seconds of the actor's own clock, but for ages (``_s``), which no clock of another machine can
spoil. New fields go to the end with a default: readers of an older ``waits.json`` go on.
"""

from __future__ import annotations

import msgspec

from streamrl.protocol.segments import StoreUse
from streamrl.protocol.waits import Calls, Doing, Wait


class GroupFact(msgspec.Struct, frozen=True):
    """A group that a batch may be waiting for. ``settled`` of its ``sessions`` have been pushed."""

    uid: str
    state: str
    attempt: int
    age_s: float  # since it was admitted
    worker: str | None
    settled: int
    sessions: int
    late: bool = False  # sampling waits for it: the next publication would make it too stale
    left_s: float | None = None  # of a late one: until it is given up


class ReplayFacts(msgspec.Struct, frozen=True):
    """The replay buffer at one instant. ``needed``: groups of a batch, as the trainer last asked; 0 before."""

    needed: int = 0
    pending: int = 0
    running: int = 0
    ready: int = 0
    leased: int = 0
    outstanding: int = 0
    capacity_groups: int = 0
    unpublished: int = 0  # slots that the next publication frees
    leasable: int = 0
    blocked_by: str | None = None
    admission: str | None = None  # the limit that keeps the next group out; None: there is a free slot
    breaker: str = "closed"
    breaker_reason: str | None = None
    breaker_trials: str = ""  # failed ones of those allowed
    failures: dict[str, int] = {}  # of the living groups: sessions and attempts by reason
    oldest: list[GroupFact] = []  # those that a batch waits for: late ones first, then by sequence number
    workers: dict[str, float] = {}  # rollout actors with the seconds since they were last heard
    lease_s: float = 0.0
    expired_leases: int = 0
    end_of_data: bool = False
    closed: bool = False
    clock: float = 0.0  # the buffer's own; only differences mean something


class RolloutFacts(msgspec.Struct, frozen=True):
    """A rollout actor's slots, and how far its engine is."""

    slots: int = 0
    sessions: int = 0
    groups: int = 0
    gate_closed_s: float | None = None  # it leases nothing while it validates alone; None: the gate is open
    engine_version: int = 0
    engine_quiet_s: float | None = None  # since the engine last gave a token; None: it does not tell, or has nothing to do


class TrainerFacts(msgspec.Struct, frozen=True):
    """Where the trainer stands. ``unacknowledged``: replicas that the publication of ``version`` waits for, with seconds; 0: their turn has not come."""

    step: int = 0
    total_steps: int = 0
    version: int = 0
    published: int = 0
    step_age_s: float | None = None  # since the last step ended; None: none has
    unacknowledged: dict[str, float] = {}
    serving: list[str] = []
    held: list[str] = []  # replicas that answer a validation and keep their version


class Health(msgspec.Struct, frozen=True):
    """What an actor waits for right now, and whether its process has loaded torch."""

    name: str
    pid: int
    waits: list[Wait]
    imports_torch: bool
    time: float = 0.0  # its clock as it answered
    progress: int = 0  # only grows; equal over time while nothing gets done
    progress_age_s: float = 0.0
    cpu_s: float = 0.0  # of the process so far
    num_doing: int = 0
    doing: list[Doing] = []  # the oldest sessions or learner calls
    calls: list[Calls] = []
    replay: ReplayFacts | None = None
    store: StoreUse | None = None
    rollout: RolloutFacts | None = None
    trainer: TrainerFacts | None = None
    is_open: bool = True  # False while it loads its model, or whatever it does before it serves

"""The whole state of a replay buffer as one Struct: what a journal file begins with, and what two buffers are compared by.

``load(dump(buffer))`` into an empty buffer gives one that answers every later call alike. Queues and counters that follow from the groups are
not saved but built again.
"""

from __future__ import annotations

import msgspec

from streamrl.errors import ProtocolError
from streamrl.protocol.groups import ReplayStats
from streamrl.replay.breaker import BreakerState
from streamrl.replay.buffer import ReplayBuffer
from streamrl.replay.garbage import GarbageState
from streamrl.replay.groups import Group
from streamrl.replay.lease import LearnerState, WorkerState
from streamrl.replay.provisional import TrainedGroup
from streamrl.replay.zero_variance import SignalState


class BufferState(msgspec.Struct, kw_only=True):
    """Field by field what ``ReplayBuffer`` and its parts hold."""

    published_version: int
    closed: bool
    end_of_data: bool
    next_seq_no: int
    frontier: tuple[int, int] | None
    trained_unpublished: int
    spent_unpublished: int
    claims_trained: int
    claimed: int
    groups: list[Group]  # alive, in order of admission
    ended: dict[str, str]  # tombstones: uid -> fate
    trained: list[TrainedGroup]  # in no checkpoint yet
    trained_count: int
    trained_final: int
    trained_forgotten: int
    totals: ReplayStats  # of the ledger
    workers: list[WorkerState]
    learners: LearnerState
    breaker: BreakerState
    garbage: GarbageState
    quarantine: list[str]
    signal: SignalState
    announced_version: int


def dump(buffer: ReplayBuffer) -> BufferState:
    """The state now. Shares groups and rows with the buffer: encode it before the next call."""
    life, provisional = buffer.life, buffer.life.provisional
    return BufferState(
        published_version=buffer.published_version,
        closed=buffer.closed,
        end_of_data=buffer.end_of_data,
        next_seq_no=buffer.next_seq_no,
        frontier=buffer.frontier,
        trained_unpublished=buffer.trained_unpublished,
        spent_unpublished=buffer.spent_unpublished,
        claims_trained=buffer.claims_trained,
        claimed=buffer.horizon.claimed,
        groups=list(buffer.table.groups.values()),
        ended=buffer.table.ended,
        trained=provisional.groups(),
        trained_count=provisional.count,
        trained_final=provisional.final,
        trained_forgotten=provisional.forgotten,
        totals=buffer.ledger.fill(ReplayStats()),
        workers=life.workers.dump(),
        learners=buffer.learners.dump(),
        breaker=buffer.breaker.dump(),
        garbage=life.garbage.dump(),
        quarantine=life.quarantine.names(),
        signal=life.signal.dump(),
        announced_version=buffer.announced_version,
    )


def load(buffer: ReplayBuffer, state: BufferState) -> None:
    """Fill an empty buffer. The state must come from elsewhere (a file): the buffer takes its lists over."""
    if buffer.ledger.admitted or buffer.table.groups:
        raise ProtocolError(f"a state is loaded into an empty buffer, got one with {buffer.ledger.admitted} admitted groups; make a new one")
    life, table = buffer.life, buffer.table
    buffer.published_version, buffer.closed, buffer.end_of_data = state.published_version, state.closed, state.end_of_data
    buffer.next_seq_no, buffer.frontier = state.next_seq_no, state.frontier
    buffer.trained_unpublished, buffer.spent_unpublished = state.trained_unpublished, state.spent_unpublished
    buffer.claims_trained, buffer.horizon.claimed, buffer.announced_version = state.claims_trained, state.claimed, state.announced_version
    table.ended = state.ended
    life.garbage.load(state.garbage)
    for group in state.groups:
        table.place(group, group.state)
        if group.state == "pending" and life.garbage.is_held(group.uid):
            table.pending.discard(group)
    buffer.ledger.load(state.totals)
    life.provisional.load(state.trained_count, state.trained_final, state.trained_forgotten, state.trained)
    life.workers.load(state.workers, table.groups)
    buffer.learners.load(state.learners, table.groups)
    buffer.breaker.load(state.breaker)
    life.quarantine.restore(state.quarantine)
    life.signal.load(state.signal)
    buffer.late.load()

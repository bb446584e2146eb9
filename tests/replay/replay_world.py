"""A small world around a replay buffer: a clock that moves by hand, prompts, pushes, and the check that everything adds up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from streamrl.config.rollout import ReplayConfig
from streamrl.protocol.groups import GroupLease, SessionPush
from streamrl.protocol.keys import TrajectoryKey
from streamrl.protocol.trajectory import Prompt
from streamrl.replay import BufferSpec, JournalledBuffer, ReplayBuffer
from streamrl.replay.journal import ROTATE_BYTES
from streamrl.replay.state import dump


class HandClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += seconds


def make_buffer(per_step: int = 4, n: int = 2, **config: Any) -> tuple[ReplayBuffer, HandClock]:
    clock = HandClock()
    return ReplayBuffer(ReplayConfig(**config), groups_per_step=per_step, n=n, clock=clock), clock


def make_journalled(folder: Path, per_step: int = 4, n: int = 2, rotate_bytes: int = ROTATE_BYTES, **config: Any) -> tuple[JournalledBuffer, HandClock]:
    clock = HandClock()
    return JournalledBuffer.open(folder, BufferSpec(ReplayConfig(**config), per_step, n), clock, rotate_bytes), clock


def picture(buffer: ReplayBuffer) -> Any:
    """The whole state as plain data, to compare two buffers by."""
    return msgspec.to_builtins(dump(buffer), str_keys=True)


def prompts(count: int, start: int = 0, row: dict[str, Any] | None = None) -> list[Prompt]:
    return [Prompt(f"g{i}", row or {"extra_info": {"index": i}}, 0, i) for i in range(start, start + count)]


def good(lease: GroupLease, session_id: int, version: int = 0, rows: int = 1, tokens: int = 3) -> SessionPush:
    keys = [str(TrajectoryKey(lease.uid, session_id, index)) for index in range(rows)]
    tag = {"prompt_len": 4, "response_len": tokens, "seq_len": 4 + tokens, "min_global_steps": version, "max_global_steps": version}
    return SessionPush(lease.uid, lease.attempt, session_id, keys, [dict(tag) for _ in keys])


def bad(lease: GroupLease, session_id: int, reason: str = "env_error", retryable: bool = True) -> SessionPush:
    return SessionPush(lease.uid, lease.attempt, session_id, reason=reason, retryable=retryable)


def finish(buffer: ReplayBuffer | JournalledBuffer, lease: GroupLease, version: int = 0, **kw: Any) -> None:
    for session_id in range(lease.n):
        buffer.push(good(lease, session_id, version, **kw))


def start(buffer: ReplayBuffer | JournalledBuffer, count: int, first: int = 0, worker: str = "w0") -> list[GroupLease]:
    buffer.admit(prompts(count, first))
    return buffer.lease(worker, count).leases


def train(buffer: ReplayBuffer | JournalledBuffer, count: int) -> list[str]:
    batch = buffer.take(count)
    assert batch is not None
    assert buffer.check_bound(batch.lease_id) == []
    buffer.commit(batch.lease_id)
    return batch.uids


def check_world(buffer: ReplayBuffer, ceiling: int = 0) -> int:
    """Counts, ledger and bound at one instant, recomputed from the groups themselves. After a rollback up to ``ceiling`` groups may be outstanding;
    returns how many may be from now on."""
    stats = buffer.stats()
    alive = list(buffer.table.groups.values())
    for state in ("pending", "running", "ready", "leased"):
        assert getattr(stats, state) == sum(g.state == state for g in alive), state
    assert stats.admitted == stats.trained + sum(stats.dropped.values()) + len(alive)
    pushes = [session for g in alive for session in g.sessions.values()]
    rows = sum(len(session.keys) for session in pushes)
    tokens = sum(tag["response_len"] for session in pushes for tag in session.tags)
    assert stats.trajectories_generated == stats.trajectories_trained + sum(stats.trajectories_dropped.values()) + rows
    assert stats.tokens_generated == stats.tokens_trained + sum(stats.tokens_dropped.values()) + tokens
    assert stats.outstanding == len(alive) + stats.trained_unpublished + stats.spent_unpublished <= max(stats.capacity_groups, ceiling)
    if buffer.breaker.state in ("open", "trial", "tripped"):
        assert buffer.leasable <= 1 and buffer.leasable + (buffer.breaker.state != "open") <= 1
    for g in alive:
        versions = [tag["min_global_steps"] for s in g.sessions.values() for tag in s.tags]
        assert g.oldest_version == min(versions, default=None)
        if g.state in ("running", "ready"):
            assert max(0, stats.published_version - min(versions, default=stats.published_version)) <= buffer.config.max_staleness
    return max(stats.capacity_groups, stats.outstanding)

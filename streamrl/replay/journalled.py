"""A replay buffer that survives its process: every call that changes it is written down before its result is handed out.

The buffer is deterministic, so the calls with their times are its state: ``open`` makes the calls of the newest journal file again and checks
that they have the same consequences. Guarantees: whatever a caller was told is true after a ``kill -9`` too; what was not yet answered either
happened whole or not at all, and its repeat (same request id) gets the same answer. Not covered: the death of the machine between two fsyncs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from streamrl.errors import RunFailed, StreamrlError
from streamrl.protocol.groups import AdmissionReply, Heartbeat, LeaseReply, ReplaySnapshot, ReplayStats, SessionPush, SpentTokens, TakenBatch
from streamrl.protocol.request import current_request
from streamrl.protocol.trajectory import Prompt
from streamrl.replay.buffer import ReplayBuffer
from streamrl.replay.journal import ROTATE_BYTES, Journal, journal_files
from streamrl.replay.records import ENCODER, REPLIES, BufferSpec, Call
from streamrl.replay.replayed import CallClock, Replayed, replay, with_spec

log = logging.getLogger(__name__)


class JournalledBuffer:
    """The calls of ``ReplayBuffer`` that change something; read from ``buffer``. Make it with ``open``."""

    def __init__(self, live: Replayed, journal: Journal, went_on: bool) -> None:
        self._live = live
        self._journal = journal
        self._broken: str | None = None
        self.went_on = went_on  # the journal held an earlier life

    @classmethod
    def open(cls, folder: Path, spec: BufferSpec, source: Callable[[], float] = time.monotonic, rotate_bytes: int = ROTATE_BYTES) -> JournalledBuffer:
        """Go on where the journal in ``folder`` ends, or begin one. A changed configuration holds from now on; the number of sessions can't change."""
        clock, journal, files = CallClock(source), Journal(folder, rotate_bytes), journal_files(folder)
        if not files:
            fresh = Replayed(spec, clock)
            journal.begin(fresh.opening(anew=True))
            return cls(fresh, journal, went_on=False)
        live = replay(files[-1], clock)
        log.info("replay goes on from %s with %d living groups", files[-1], len(live.buffer.table.groups))
        if live.spec == spec:
            journal.go_on()
        else:
            live = with_spec(spec, live)
            journal.begin(live.opening(anew=False))
        journalled = cls(live, journal, went_on=True)
        journalled.recovered()
        return journalled

    @property
    def buffer(self) -> ReplayBuffer:
        return self._live.buffer

    def close_files(self) -> None:
        self._journal.close()

    # ---- reading

    def admission(self, max_groups: int) -> AdmissionReply:
        return self.buffer.admission(max_groups)

    def snapshot(self) -> ReplaySnapshot:
        return self.buffer.snapshot()

    def stats(self) -> ReplayStats:
        return self.buffer.stats()

    # ---- calls: one line each, as in ReplayBuffer

    def admit(self, prompts: list[Prompt]) -> list[int]:
        return self._call("admit", prompts)

    def end_of_prompts(self) -> None:
        self._call("end_of_prompts")

    def lease(self, worker: str, max_groups: int) -> LeaseReply:
        return self._call("lease", worker, max_groups)

    def push(self, session: SessionPush) -> bool:
        return self._call("push", session)

    def heartbeat(self, worker: str) -> Heartbeat:
        return self._call("heartbeat", worker)

    def give_back(self, worker: str, leases: Iterable[tuple[str, int]]) -> None:
        self._call("give_back", worker, list(leases))

    def spent(self, worker: str, spent: list[SpentTokens]) -> int:
        return self._call("spent", worker, spent)

    def release_worker(self, worker: str) -> int:
        return self._call("release_worker", worker)

    def take(self, num_groups: int) -> TakenBatch | None:
        return self._call("take", num_groups)

    def check_bound(self, lease_id: int) -> list[str]:
        return self._call("check_bound", lease_id)

    def commit(self, lease_id: int, rejected: Iterable[str] = (), publishes: bool = True) -> None:
        self._call("commit", lease_id, list(rejected), publishes)

    def skip(self, lease_id: int) -> None:
        self._call("skip", lease_id)

    def abandon(self, lease_id: int) -> None:
        self._call("abandon", lease_id)

    def published(self, version: int) -> None:
        self._call("published", version)

    def new_learner(self) -> int:
        return self._call("new_learner")

    def checkpointed(self, mark: int) -> None:
        """Also begins a new file: what a recovery reads stays short."""
        self._call("checkpointed", mark)
        self._rotate()

    def rollback(self, mark: int | None = None, version: int | None = None) -> int:
        return self._call("rollback", mark, version)

    def give_up(self, uids: Iterable[str]) -> int:
        return self._call("give_up", list(uids))

    def forget_missing(self, keys: Iterable[str]) -> int:
        return self._call("forget_missing", list(keys))

    def restarted(self) -> int:
        return self._call("restarted")

    def recovered(self) -> None:
        self._call("recovered")

    def restore(self, snapshot: ReplaySnapshot) -> None:
        """Whatever the journal says, this life begins with the snapshot: as the state of a new file, so it happens whole or not at all."""
        fresh = Replayed(self._live.spec, self._live.clock)
        fresh.buffer.restore(snapshot)
        self._live, self.went_on = fresh, False
        self._rotate(anew=True)

    def expire(self) -> int:
        return self._call("expire")

    def close(self) -> None:
        self._call("close")

    def collect_garbage(self) -> list[str]:
        return self._call("collect_garbage") if self.buffer.life.garbage.waits() else []

    def garbage_cleared(self, keys: Iterable[str]) -> None:
        self._call("garbage_cleared", list(keys))

    # ---- how a call is made

    def _call(self, name: str, *arguments: Any) -> Any:
        if self._broken is not None:
            raise RunFailed(self._broken)
        request = current_request() if name in REPLIES else None
        known = self._live.replies.find(request)
        if known is not None and known[0] == name:
            return known[1]
        encoded = msgspec.Raw(ENCODER.encode(arguments))  # before anything changes: what can't be written must not happen
        before = self.buffer.table.changes
        result, error = self._make(name, arguments, request)
        if name != "take" or result is not None or error is not None or self.buffer.table.changes != before:  # a take that must wait changes nothing
            self._write(Call(name, encoded, self._instant, request, None if error is None else type(error).__name__, self._live.fates))
        if error is not None:
            raise error
        return result

    def _make(self, name: str, arguments: tuple[Any, ...], request: str | None) -> tuple[Any, StreamrlError | None]:
        self._instant = self._live.clock.hold()
        try:
            return self._live.make(name, arguments, request)
        except BaseException:
            self._broken = (
                f"a call of the replay buffer ends well or with an error of its own, got a bug in {name} (see its traceback); restart from the journal"
            )
            raise
        finally:
            self._live.clock.run()

    def _write(self, call: Call) -> None:
        try:
            self._journal.append(call)
            if self._journal.is_full():
                self._rotate()
        except OSError as error:
            self._break(error)

    def _rotate(self, anew: bool = False) -> None:
        try:
            self._journal.begin(self._live.opening(anew))
        except OSError as error:
            self._break(error)

    def _break(self, error: OSError) -> None:
        """The state is ahead of the file, so nobody may see it: the next life begins before this call."""
        self._broken = f"every call of the replay buffer is written to its journal, got {error} in {self._journal.folder}; free space there and resume the run"
        raise RunFailed(self._broken) from error

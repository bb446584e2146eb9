"""A run as the files of its folder show it, for whoever wants to know how it is. Reads; decides nothing.

A file that is missing, cut off or of another version counts as one that says nothing, and ``lacks`` has why: a diagnosis is wanted most when things are
not in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import psutil

from streamrl.diagnosis.answers import Heard, Table
from streamrl.errors import UsageError
from streamrl.protocol.health import Health
from streamrl.protocol.waits import Calls, Wait
from streamrl.telemetry.run_folder import RunFolder
from streamrl.telemetry.steps import read_last_step
from streamrl.telemetry.summary import RunStatus, RunSummary, read_record, read_status, read_summary

T = TypeVar("T")
ProcessState = Literal["running", "stopped", "gone", "unknown"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SAME_START_S = 0.1
MISSING = "is missing"
STATES: dict[str, ProcessState] = {"stopped": "stopped", "tracing-stop": "stopped", "zombie": "gone", "dead": "gone"}


class Process(msgspec.Struct, frozen=True):
    """A process that an actor wrote down, and how it is now. ``unknown``: it is on another machine."""

    pid: int
    started: float
    state: ProcessState


class RunView(msgspec.Struct, frozen=True):
    """Everything a diagnosis reads. Ages are as of ``table.time``, when the driver wrote its table."""

    now: float
    table: Table
    status: RunStatus | None = None
    summary: RunSummary | None = None
    driver: ProcessState = "unknown"
    processes: dict[str, list[Process]] = {}  # by actor: its own first, then what it started
    folder: str = ""
    lacks: dict[str, str] = {}  # files that tell nothing, and why: status.json "is missing"; a summary is not missed
    step: int | None = None  # the newest in metrics/steps.jsonl; only read when a file tells nothing
    checkpoint: int | None = None  # the step of the newest one, by its name
    has_journal: bool = False

    @property
    def has_ended(self) -> bool:
        return self.summary is not None or self.is_interrupted

    @property
    def is_interrupted(self) -> bool:
        """Ended at once by a second interrupt: there is no summary, and the driver's last word says so."""
        return self.summary is None and self.status is not None and self.status.state == "interrupted"

    @property
    def is_watched(self) -> bool:
        """Whether the driver has asked its actors; an earlier life of the run may have left a table."""
        return self.status is not None and self.table.time >= self.status.started and "trainer" in self.table.actors

    @property
    def is_starting(self) -> bool:
        """No actor has been asked yet. While the driver opens them it writes nothing, for 10 to 20 s or for as long as a large model takes to load."""
        return self.status is not None and not self.is_watched and not self.status.step and self.status.state in ("starting", "running")

    def names(self, role: str) -> list[str]:
        """Actors of a role, by number: learner-0, learner-1, ..."""
        return sorted((name for name in self.table.actors if name == role or name.startswith(f"{role}-")), key=lambda name: (len(name), name))

    def health(self, name: str) -> Health | None:
        """The newest that is known of an actor, also of a silent one."""
        health = self.table.actors.get(name)
        return health if health is not None else self._heard(name).last

    def silent_s(self, name: str) -> float:
        """For how long an actor has not answered; 0 while it does."""
        return 0.0 if self.table.actors.get(name) is not None else max(0.0, self.table.time - self._heard(name).time)

    def offset_s(self, name: str) -> float:
        return self._heard(name).offset_s

    def drift_s(self, name: str) -> float:
        return self._heard(name).drift_s

    def host(self, name: str) -> str:
        return self._heard(name).host

    def age(self, name: str, at: float) -> float:
        """Seconds since ``at``, a time of that actor's clock."""
        return max(0.0, self.table.time - (at - self.offset_s(name)))

    def waits(self, name: str) -> list[Wait]:
        health = self.health(name)
        return [] if health is None else health.waits

    def calls(self, name: str, on: str) -> Calls | None:
        health = self.health(name)
        return next((calls for calls in health.calls if calls.on == on), None) if health is not None else None

    def quiet_s(self, name: str) -> float:
        """Since an actor got anything done, when it last answered; 0 for one that never has."""
        health = self.health(name)
        return health.progress_age_s if health is not None else 0.0

    def state_of(self, name: str) -> ProcessState:
        """Of an actor's own process."""
        found = self.processes.get(name)
        return found[0].state if found else "unknown"

    def idle_s(self) -> float | None:
        """Since a learner step or a session has last ended, whichever was later; None when neither ever has."""
        trainer, ages = self.health("trainer"), []
        if trainer is not None and trainer.trainer is not None and trainer.trainer.step_age_s is not None:
            ages.append(trainer.trainer.step_age_s + self.silent_s("trainer"))
        for name in self.names("rollout"):
            sessions = self.calls(name, "its session")
            if sessions is not None and sessions.last_end and not sessions.failures:
                ages.append(self.age(name, sessions.last_end))
        return min(ages, default=None)

    def _heard(self, name: str) -> Heard:
        return self.table.heard.get(name) or Heard(self.table.time)


def read_view(folder: RunFolder, now: float | None = None) -> RunView:
    """The run in ``folder`` as of now."""
    summary, no_summary = _told(lambda: read_summary(folder.summary))
    status, no_status = _told(lambda: read_status(folder.status))
    table, no_table = _told(lambda: read_record(folder.waits, Table))
    lacks = {path.name: lack for path, lack in ((folder.status, no_status), (folder.waits, no_table)) if lack}
    if no_summary not in ("", MISSING):
        lacks[folder.summary.name] = no_summary
    last = _told(lambda: read_last_step(folder.steps))[0] if lacks else None
    return RunView(
        now=time.time() if now is None else now,
        table=table or Table(0.0),
        status=status,
        summary=summary,
        driver="unknown" if status is None or status.machine not in ("", _here()) else process_state(status.pid),
        processes=read_processes(folder),
        folder=str(folder.root),
        lacks=lacks,
        step=last.get("step") if last is not None else None,
        checkpoint=folder.newest_checkpoint(),
        has_journal=any(folder.ledger.glob("replay-*.journal")),
    )


def _told(read: Callable[[], T | None]) -> tuple[T | None, str]:
    """What a file says; without that, why."""
    try:
        found = read()
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
    except UsageError as error:
        return None, f"cannot be read ({error.__cause__})"
    return found, MISSING if found is None else ""


def _here() -> str:
    return BOOT_ID.read_text().strip()


class _Child(msgspec.Struct):
    pid: int
    started: float


class _Record(msgspec.Struct):
    """What an actor wrote down about its processes."""

    processes: list[_Child]
    machine: str = ""


def read_processes(folder: RunFolder) -> dict[str, list[Process]]:
    """Of every actor on record."""
    here, found = _here(), {}
    for path in sorted(folder.children.glob("*.json")):
        record = _read(path, _Record)
        if record is not None:
            near = record.machine in ("", here)
            found[path.stem] = [Process(child.pid, child.started, process_state(child.pid, child.started) if near else "unknown") for child in record.processes]
    return found


def process_state(pid: int, started: float | None = None) -> ProcessState:
    """Of a process of this machine; ``started`` (unix time, as the kernel tells) tells it from one that has its pid by now."""
    try:
        process = psutil.Process(pid)
        if started is not None and abs(process.create_time() - started) > SAME_START_S:
            return "gone"
        return STATES.get(process.status(), "running")
    except psutil.Error:
        return "gone"


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None

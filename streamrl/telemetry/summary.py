"""What a run leaves behind when it ends: ``summary.json`` and, while it lives, ``status.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from streamrl.errors import UsageError

T = TypeVar("T")

SHUTDOWN = "shutdown"  # the ledger's reason for groups that were unfinished when the run ended in order
LEFT_OVER = "left over at the end"  # what people read of them: no fault, and nothing that was thrown away


class RunSummary(msgspec.Struct, kw_only=True):
    """The result of a run. None means: never measured (no validation file, no step)."""

    status: Literal["completed", "stopped", "failed"]  # stopped: an orderly end before the last step
    steps: int  # training steps, those of a run that this one resumed included
    wall_s: float
    seed: int
    engine: str
    val_accuracy_first: float | None = None
    val_accuracy_last: float | None = None
    reward_first: float | None = None  # mean score over the first steps
    reward_last: float | None = None
    lag_mean: float = 0.0  # versions, over trained groups
    lag_max: int = 0
    max_staleness: int = 0
    trajectories: int = 0  # acknowledged rows
    generated_tokens: int = 0  # response tokens of acknowledged rows
    trained_tokens: int = 0
    groups_trained: int = 0
    groups_dropped: dict[str, int] = {}  # by reason, without the unfinished ones
    weight_version: int = 0
    run: str = ""  # the run folder
    error: str | None = None  # the one line of a failed run
    partial_share: float = 0.0  # share of trained groups in which a session had failed
    token_fates: dict[str, int] = {}  # of all tokens that the policy wrote: trained, stale, filtered, failed, evaluation, in_flight
    groups_left_over: int = 0  # unfinished when the run ended
    earlier_trajectories: int = 0  # of ``trajectories``, those from before this driver began, which ``wall_s`` does not cover
    earlier_generated_tokens: int = 0  # of ``generated_tokens``, likewise

    @property
    def unfinished(self) -> str:
        """The word for groups and tokens without an end: after an end in order nothing goes on; a run that failed may, and loses none of them."""
        return "in flight" if self.status == "failed" else LEFT_OVER

    @property
    def trajectories_per_s(self) -> float:
        """Since this driver began."""
        return self._rate(self.trajectories - self.earlier_trajectories)

    @property
    def generated_tokens_per_s(self) -> float:
        """Since this driver began."""
        return self._rate(self.generated_tokens - self.earlier_generated_tokens)

    def _rate(self, count: int) -> float:
        return max(0, count) / self.wall_s if self.wall_s > 0 else 0.0


class RunStatus(msgspec.Struct, kw_only=True):
    """The driver about itself, rewritten every second; an old ``updated`` means that the driver hangs or is dead."""

    state: Literal["starting", "running", "stopping", "completed", "stopped", "failed", "interrupted"]
    pid: int
    started: float  # unix time
    updated: float
    step: int = 0
    total_steps: int = 0
    version: int = 0
    message: str = ""
    machine: str = ""  # on which that pid is, by its boot id; empty: this one

    @property
    def progress(self) -> str:
        """``step 36 of 60``, or ``step 36`` before the number of steps is known."""
        return f"step {self.step} of {self.total_steps}" if self.total_steps else f"step {self.step}"


def read_summary(path: Path) -> RunSummary | None:
    """None while the run has not ended."""
    return read_record(path, RunSummary)


def read_status(path: Path) -> RunStatus | None:
    """None before the driver has written one."""
    return read_record(path, RunStatus)


def read_record(path: Path, kind: type[T]) -> T | None:
    """None while there is no such file; UsageError for one that is not of that kind."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} must hold a {kind.__name__} ({error}); it was written by another version of streamrl or changed by hand") from error

"""The files of one run, by name, and how they are written: aside, then renamed, so that a reader never sees half a file.

    config.yaml             the resolved configuration; its presence is what makes a folder a run
    plan.txt                what it amounts to, the objective in one line: as `streamrl check` prints it
    status.json             the driver's last word about itself
    waits.json              who waits for whom, every second
    summary.json            the result, written once at the end
    .summary.earlier.json   that of the life before, until the one that resumes it has begun
    metrics/steps.jsonl     one line a step
    metrics/targets.json    the actors' metric pages (Prometheus file_sd)
    metrics/recording-*     all metrics of all actors, every few seconds
    tensorboard/, wandb/    what the experiment trackers of trainer.logger keep
    logs/<actor>.log        one log an actor
    logs/<actor>.stacks     where its threads stood whenever it was asked
    checkpoints/            what a resumed run starts from
    ledger/                 journals of replay buffer and store: what the run went through, and where its rows lie
    trainer.msgpack         where the trainer stands, for its successor
    children/               processes that engines started, with their start times
    sockets/<node>/         where the actors of a node answer calls, while the run lasts
    quarantine.jsonl        prompts that failed too often
    samples/step-*.bin      whole groups of the last steps
    report.html             what `streamrl report` made of all this, unless it was told another place

Knows no configuration: the text to save is handed in.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from streamrl.errors import RunFailed, UsageError

log = logging.getLogger(__name__)

_CHECKPOINT = re.compile(r"(?:\.replaced_)?global_step_(\d+)")  # the first part: its successor was killed before it took the name


class RunFolder:
    """Paths below ``root``. Making the object touches nothing; ``create`` claims the folder for a run, ``open`` finds one."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().absolute()
        self.config = self.root / "config.yaml"
        self.plan = self.root / "plan.txt"
        self.status = self.root / "status.json"
        self.waits = self.root / "waits.json"
        self.summary = self.root / "summary.json"
        self.earlier_summary = self.root / ".summary.earlier.json"
        self.metrics = self.root / "metrics"
        self.steps = self.metrics / "steps.jsonl"
        self.targets = self.metrics / "targets.json"
        self.logs = self.root / "logs"
        self.checkpoints = self.root / "checkpoints"
        self.ledger = self.root / "ledger"
        self.standing = self.root / "trainer.msgpack"
        self.children = self.root / "children"
        self.sockets = self.root / "sockets"
        self.quarantine = self.root / "quarantine.jsonl"
        self.samples = self.root / "samples"
        self._lock_file: int | None = None
        self._to_write: dict[Path, str] = {}  # when a resumed run begins

    @property
    def run_id(self) -> str:
        """Names the run outside its folder (shared memory, Ray namespace): two folders of one name in different places are two runs."""
        return f"{self.root.name}-{hashlib.blake2b(str(self.root.resolve()).encode(), digest_size=4).hexdigest()}"

    @classmethod
    def create(cls, root: str | Path, config_text: str, plan_text: str = "", *, resume: bool = False) -> RunFolder:
        """Claim ``root`` for a run and save its configuration. Of two launches into one folder exactly one wins, also when both resume. A resumed run
        leaves the settings and the result of the life before in their places until it calls ``begin``."""
        folder = cls(root)
        try:
            folder._take(config_text, plan_text, resume)
        except FileExistsError:
            folder.close()
            raise UsageError(
                f"a run needs a folder of its own, got {folder.root}, which already holds a run; name another with --run-dir, or add --resume {folder.root}"
            ) from None
        except OSError as error:
            folder.close()
            raise UsageError(f"the run folder must be writable, got {folder.root} ({error}); choose another with run.dir or --run-dir") from error
        return folder

    def _take(self, config_text: str, plan_text: str, resume: bool) -> None:
        for path in (self.metrics, self.logs, self.checkpoints, self.children):
            path.mkdir(parents=True, exist_ok=True)
        self._lock()
        if resume:
            self._to_write = {self.config: config_text, self.plan: plan_text}
            if self.summary.exists():
                os.replace(self.summary, self.earlier_summary)  # the run has no result again; readers must not take it for one that has ended
        else:
            _claim(self.config, config_text)
            write_text(self.plan, plan_text)

    def begin(self) -> None:
        """Every actor has accepted the settings of a resumed run: they are the folder's from now on, and the result of the life before is history."""
        try:
            for path, text in self._to_write.items():
                write_text(path, text)
            self.earlier_summary.unlink(missing_ok=True)
        except OSError as error:
            raise RunFailed(f"the run folder must be writable, got {self.root} ({error}); free space there and resume the run") from error
        self._to_write = {}

    def newest_checkpoint(self) -> int | None:
        """The step of the newest complete one, by its name: whoever loads it checks it."""
        found = (_CHECKPOINT.fullmatch(manifest.parent.name) for manifest in self.checkpoints.glob("*global_step_*/manifest.json"))
        return max((int(match[1]) for match in found if match), default=None)

    def _lock(self) -> None:
        """Held until ``close`` or the end of this process, however it ends: two drivers never write into one folder."""
        self._lock_file = os.open(self.root / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise UsageError(f"one driver at a time writes into a run folder, got {self.root}, where another one is running; stop it first") from None

    def close(self) -> None:
        """Let go of a folder that ``create`` claimed."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def open(cls, root: str | Path) -> RunFolder:
        """The folder of an existing run."""
        folder = cls(root)
        if not folder.config.is_file():
            raise UsageError(f"a run folder holds config.yaml, got {folder.root}, which does not; give the folder that `streamrl launch` named")
        return folder

    def log_file(self, actor: str) -> Path:
        """Log of one actor."""
        return self.logs / f"{actor}.log"


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` in one step, mode 0644; its folder must exist."""
    aside = _aside(path, text)
    try:
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """``write_text`` of a plain value or Struct as readable JSON (NaN and infinity become null, bytes of a file name that are no text escapes)."""
    try:
        encoded = msgspec.json.encode(value)
    except UnicodeEncodeError:
        encoded = msgspec.json.encode(_as_text(msgspec.to_builtins(value)))
    write_text(path, msgspec.json.format(encoded, indent=2).decode() + "\n")


def _as_text(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_as_text(key): _as_text(one) for key, one in value.items()}
    return [_as_text(one) for one in value] if isinstance(value, list | tuple) else value


def list_quarantined(folder: RunFolder, names: list[str]) -> bool:
    """One line a prompt in ``quarantine.jsonl``; False when the disk does not take it, which the log says."""
    try:
        write_text(folder.quarantine, "".join(msgspec.json.encode({"prompt": name}).decode() + "\n" for name in names))
    except OSError as error:
        log.warning("quarantine.jsonl could not be written: %s", error)
        return False
    return True


def read_json(path: Path) -> Any:
    """The value, None when the file does not exist."""
    try:
        return msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} must be JSON ({error}); it was changed by hand or by another program, remove it") from error


def _aside(path: Path, text: str) -> Path:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:  # a full disk: nothing of it stays there
        os.unlink(name)
        raise
    os.chmod(name, 0o644)
    return Path(name)


def _claim(path: Path, text: str) -> None:
    """Create ``path`` with ``text``; FileExistsError when somebody has it. It is empty for a moment, never half written."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    write_text(path, text)

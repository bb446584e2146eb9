"""The experiment trackers that ``trainer.logger`` may name beside ``console``, each an extra of the package.

    tensorboard    event files in tensorboard/ of the run folder, as TensorBoard's own writer makes them; needs neither torch nor TensorFlow
    wandb          a Weights & Biases run; with WANDB_MODE=offline, which needs no network and no account, in wandb/ of the run folder

Guarantees: the step axis of a resumed run goes on: TensorBoard drops what an earlier life logged of the steps that are done again, W&B keeps the
id of the run, and of those steps the values it had first. A tracker gets no secrets of the configuration: ``cluster.env`` is left out.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from streamrl.errors import EngineNotInstalled
from streamrl.telemetry.appending import append_whole
from streamrl.telemetry.sinks import Sink


@dataclass(frozen=True)
class RunInfo:
    """What a tracker shows of a run as a whole."""

    folder: Path
    run_id: str
    project: str
    experiment: str
    config: Mapping[str, Any]


def require(loggers: Iterable[str]) -> None:
    """EngineNotInstalled when the package behind a logger is absent. Looks for the package without importing it."""
    for name in loggers:
        if name in _TRACKERS and importlib.util.find_spec(name) is None:
            raise EngineNotInstalled(
                f"$.trainer.logger: {name!r} needs the package {name}, got none installed; pip install 'streamrl[{name}]', or take it off the list"
            )


def makers(loggers: Iterable[str], run: RunInfo) -> dict[str, Callable[[], Sink]]:
    """How each tracker of ``loggers`` is started; ``console`` is none."""
    return {name: partial(_TRACKERS[name], run) for name in loggers if name in _TRACKERS}


class TensorBoardSink:
    """Scalars by name; a tag has the slashes of verl's names, which TensorBoard shows as groups.

    Not TensorBoard's ``EventFileWriter``: that one writes in a thread of its own, where a full disk ends in a traceback and nobody is told.
    """

    def __init__(self, run: RunInfo) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._session = event_pb2.Event, summary_pb2.Summary, event_pb2.SessionLog
        self._writer = RecordWriter(_EventFile(run.folder / "tensorboard"))
        self._add(file_version="brain.Event:2")
        self._is_new = True

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._is_new:  # what is there from this step on is of an earlier life
            self._is_new = False
            self._add(step=step, session_log=self._session(status=self._session.START))
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step=step, summary=self._summary(value=scalars))

    def close(self) -> None:
        self._writer.close()

    def _add(self, **fields: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **fields).SerializeToString())


class _EventFile:
    """A new event file, in time after those that are there. Each record is in it, whole, when ``write`` returns; OSError names the file otherwise."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        second, part = divmod(time.time_ns(), 10**9)
        self._path = folder / f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}.{part:09d}"
        self._handle = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)

    def write(self, record: bytes) -> None:
        append_whole(self._handle, record, self._path)

    def close(self) -> None:
        os.close(self._handle)


class WandbSink:
    """One W&B run; its id is that of the run folder, so that a resumed one goes on in it."""

    def __init__(self, run: RunInfo) -> None:
        import wandb

        config = {name: section for name, section in run.config.items() if name != "cluster"}
        settings = wandb.Settings(silent=True, console="off")  # the terminal stays the driver's
        self._run = wandb.init(
            project=run.project,
            name=run.experiment,
            id=re.sub(r"[^\w-]", "-", run.run_id),
            resume="allow",
            dir=str(run.folder),
            config=config,
            settings=settings,
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


_TRACKERS: dict[str, Callable[[RunInfo], Sink]] = {"tensorboard": TensorBoardSink, "wandb": WandbSink}

"""The experiment trackers that ``trainer.logger`` may name beside ``console``, each an extra of the package.

    tensorboard    event files in tensorboard/ of the run folder, by TensorBoard's own writer; needs neither torch nor TensorFlow
    wandb          a Weights & Biases run; with WANDB_MODE=offline, which needs no network and no account, in wandb/ of the run folder

Guarantees: the step axis of a resumed run goes on: TensorBoard drops what an earlier life logged of the steps that are done again, W&B keeps the
id of the run, and of those steps the values it had first. A tracker gets no secrets of the configuration: ``cluster.env`` is left out.
"""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from streamrl.errors import EngineNotInstalled
from streamrl.telemetry.sinks import Sink

FLUSH_S = 5.0  # TensorBoard sees a step this late at most


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
    """Scalars by name; a tag has the slashes of verl's names, which TensorBoard shows as groups."""

    def __init__(self, run: RunInfo) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._session = event_pb2.Event, summary_pb2.Summary, event_pb2.SessionLog
        self._writer = EventFileWriter(str(run.folder / "tensorboard"), flush_secs=FLUSH_S)
        self._is_new = True

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._is_new:  # what is there from this step on is of an earlier life
            self._is_new = False
            start = self._session(status=self._session.START)
            self._writer.add_event(self._event(wall_time=time.time(), step=step, session_log=start))
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars)))

    def close(self) -> None:
        self._writer.close()


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

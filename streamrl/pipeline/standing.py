"""Where a trainer stands, in a file of the run folder: what its successor needs to go on when its process alone has died.

Written before each update and after each settled step, aside and renamed. A checkpoint is for the day when the learner's weights are lost; this
is for the day when they are not. Not fsynced: it survives processes, as the weights in the learner do, and not the machine.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from streamrl.errors import CheckpointError
from streamrl.pipeline.checkpoints import TrainerState
from streamrl.pipeline.records import StepRecord, Totals
from streamrl.protocol.meta import KVBatchMeta
from streamrl.protocol.weights import WeightManifest


class OpenStep(msgspec.Struct):
    """A step whose update is asked for now: all that is needed to settle and report it once the learner has done it."""

    lease_id: int
    meta: KVBatchMeta  # what is left of the batch
    lags: list[int]
    rejected: list[str]  # uids
    metrics: dict[str, Any]


class Standing(msgspec.Struct):
    """``manifest``: the newest version that left the learner. ``open``: the step of ``state`` is not settled yet."""

    state: TrainerState
    totals: Totals
    manifest: WeightManifest
    open: OpenStep | None = None
    first_record: int = 0
    records: list[StepRecord] = []  # the newest ones, from number ``first_record`` on


def write_standing(path: Path, standing: Standing) -> None:
    """Replace the file in one step."""
    aside = path.with_suffix(".tmp")
    aside.write_bytes(msgspec.msgpack.encode(standing))
    os.replace(aside, path)


def read_standing(path: Path) -> Standing:
    """CheckpointError when there is none: nothing was published yet."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=Standing)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"a trainer that goes on finds where its predecessor stood, got {error} for {path}; resume the run") from error

"""A few whole groups of each step, kept in the run folder: rows live in shared memory and are reclaimed once they are trained.

    samples/step-000012.bin     keys, tags and all columns of the step's first groups, as the update is about to read them

Guarantees: a reader never sees half a file; at most ``keep`` files stay, the newest; a write that fails is logged once and never stops the
run; what is read back is what was written (a checksum) and holds data only (the project's codec, no pickle). A resumed run replaces the files
of the steps it does again.
Not in a sample: columns that only some of its rows have. Its size is that of the groups: nothing is cut out of a long answer.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.errors import DataError, ProtocolError, StreamrlError
from streamrl.protocol.keys import TrajectoryKey
from streamrl.protocol.meta import KVBatchMeta

if TYPE_CHECKING:
    from tensordict import TensorDict

FORMAT = 2
_NAME = re.compile(r"step-(\d{6,})\.bin")
_ASIDE = ".step.aside"  # one name: what a killed writer leaves is overwritten by the next

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """Rows of one step: ``tags[i]`` and row i of every column belong to ``keys[i]``. Columns are tensors (jagged, dense) and object stacks."""

    step: int
    version: int  # published when the batch was taken
    keys: list[str]
    tags: list[dict[str, Any]]
    columns: dict[str, Any]


class SampleWriter:
    """Keeps samples of ``groups`` groups of the last ``keep`` steps in ``folder``; 0 groups keep none. One writer per folder."""

    def __init__(self, folder: Path, *, groups: int, keep: int) -> None:
        self._folder, self._groups, self._keep = folder, groups, keep
        self._failed = False

    def write(self, batch: KVBatchMeta, read: Callable[[KVBatchMeta], TensorDict]) -> None:
        """Keep the first groups of ``batch``; ``read`` gives all columns of some of its rows. The step is ``extra_info["global_step"]``."""
        info = batch.extra_info or {}
        if not self._groups or "global_step" not in info:
            return
        meta = first_groups(batch, self._groups)
        try:
            from streamrl.protocol.tensors.columns import columns_of

            columns = columns_of(read(meta))
            write_sample(self._folder, Sample(info["global_step"], info.get("published_version", -1), meta.keys, meta.tags, columns))
            prune(self._folder, info["global_step"], self._keep)
        except (OSError, StreamrlError) as error:
            if not self._failed:
                log.warning("step %d leaves no sample in %s (%s); training goes on, further failures are not logged", info["global_step"], self._folder, error)
            self._failed = True


def first_groups(batch: KVBatchMeta, groups: int) -> KVBatchMeta:
    """All rows of the first ``groups`` groups of the batch."""
    uids = [TrajectoryKey.parse(key).uid for key in batch.keys]
    chosen = set(list(dict.fromkeys(uids))[:groups])
    return batch.select_keys([key for key, uid in zip(batch.keys, uids, strict=True) if uid in chosen])


def write_sample(folder: Path, sample: Sample) -> Path:
    """Write the step's file, replacing it in one step; nothing is left behind when that fails."""
    from streamrl.protocol.dataproto import disk  # torch is loaded by those who write or read a sample, not by those who list them

    folder.mkdir(parents=True, exist_ok=True)
    aside, path = folder / _ASIDE, folder / f"step-{sample.step:06d}.bin"
    try:
        with aside.open("wb") as file:
            disk.write({"format": FORMAT, **vars(sample)}, file)
        os.replace(aside, path)
    except (OSError, StreamrlError):
        aside.unlink(missing_ok=True)
        raise
    return path


def prune(folder: Path, step: int, keep: int) -> None:
    """Remove samples of steps after ``step``, which a resumed run does again, and all but the newest ``keep`` others."""
    paths = sample_paths(folder)
    kept = [number for number in paths if number <= step][-keep:]
    for number, path in paths.items():
        if number not in kept:
            path.unlink(missing_ok=True)


def sample_paths(folder: Path) -> dict[int, Path]:
    """Step -> file, oldest step first; empty when there is no such folder."""
    names = os.listdir(folder) if folder.is_dir() else []
    return {int(match[1]): folder / match[0] for match in sorted(filter(None, map(_NAME.fullmatch, names)), key=lambda match: int(match[1]))}


def read_sample(path: Path) -> Sample:
    """The sample; FileNotFoundError when the run has replaced it by a newer one, DataError when it can't be read."""
    from streamrl.protocol.dataproto import disk

    try:
        found = disk.load(path)
        if found.pop("format") != FORMAT:
            raise ProtocolError(f"a sample has format {FORMAT}, got another")
        return Sample(**found)
    except FileNotFoundError:
        raise
    except (OSError, ProtocolError, AttributeError, KeyError, TypeError) as error:
        raise DataError(f"a sample of a step must be readable, got {path} ({error}); it was damaged or written by another version, remove it") from error

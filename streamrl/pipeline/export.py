"""A trained policy as a Hugging Face folder: of a checkpoint, or of the version that a living run serves. One process, no learner ranks, no Ray.

Guarantees: the folder appears under its name when it is whole; every file of the checkpoint is checked by hash first, and every tensor of a version.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from streamrl.config import Config
from streamrl.errors import CheckpointError, UsageError, WeightMismatch
from streamrl.learner import checkpoint_folder, huggingface
from streamrl.learner.checkpoint import ACTOR
from streamrl.learner.lora import write_peft
from streamrl.pipeline.checkpoints import read_state
from streamrl.pipeline.standing import read_standing
from streamrl.protocol.weights import WeightManifest
from streamrl.telemetry.run_folder import RunFolder
from streamrl.weights.reader import read_tensors

TRIES = 3  # a version may be retired between reading its name and opening its file


class Exported(NamedTuple):
    """Which policy it is. ``step`` None: a version of a living run, between two checkpoints."""

    version: int
    step: int | None
    num_tensors: int


def export_checkpoint(checkpoint: Path, target: Path, config: Config, dtype: str, *, adapter: bool = False) -> Exported:
    """The policy of a checkpoint in ``dtype``; adapters merged, or with ``adapter`` by themselves in peft's format. ``config``: names the base of adapters."""
    checkpoint_folder.check(checkpoint)
    state, source = read_state(checkpoint), checkpoint / ACTOR
    with _made_whole(target) as folder:
        if adapter:
            tensors = huggingface.saved_adapter(source)
            write_peft(folder, huggingface.adapter_record(source), tensors, config.model.path)
        else:
            tensors = huggingface.saved_policy(source, getattr(torch, dtype), config.model)
            _write(folder, huggingface.small_files(source / huggingface.FOLDER), tensors, config, dtype)
    return Exported(state.version, state.step, len(tensors))


def export_served(run: RunFolder, target: Path, config: Config) -> Exported | None:
    """The newest version that has left the learner of a run on this machine, as its engines get it. None when no such file is in memory: the run has ended,
    or lives elsewhere."""
    found = _newest_version(run)
    if found is None:
        return None
    manifest, tensors = found
    dtype = getattr(torch, config.rollout.dtype)
    if manifest.adapter is not None:
        tensors = huggingface.merged_policy(manifest.adapter, tensors, dtype, config.model)
    with _made_whole(target) as folder:
        _write(folder, huggingface.plain_files(config.model), tensors, config, config.rollout.dtype)
    return Exported(manifest.version, None, len(tensors))


def _newest_version(run: RunFolder) -> tuple[WeightManifest, dict[str, Tensor]] | None:
    for _ in range(TRIES):
        try:
            manifest = read_standing(run.standing).manifest
            return manifest, dict(read_tensors(manifest))
        except CheckpointError:
            return None
        except WeightMismatch:
            if not Path(manifest.path).parent.is_dir():
                return None
    return None


def _write(folder: Path, files: dict[str, bytes], tensors: dict[str, Tensor], config: Config, dtype: str) -> None:
    huggingface.write_files(folder, files)
    huggingface.write_model(folder, tensors, getattr(torch, dtype), trust_remote_code=config.model.trust_remote_code)


@contextmanager
def _made_whole(target: Path) -> Iterator[Path]:
    """A folder beside ``target`` that takes its name at the end of the block, and is gone after an error."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"an export makes a new folder, got {target}, which is there already; name another one or remove it")
    aside = target.with_name(f".{target.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        aside.rename(target)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"an exported folder is whole, got {error} for {target}; make room or correct the path") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)

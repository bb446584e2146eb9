"""What ``export`` and ``eval`` share: which policy a path names, and the configuration it was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from streamrl.errors import UsageError

if TYPE_CHECKING:
    from streamrl.config import Config
    from streamrl.telemetry.run_folder import RunFolder


class Policy(NamedTuple):
    """One of: a checkpoint, a run folder, a Hugging Face folder."""

    checkpoint: Path | None = None
    run: RunFolder | None = None
    folder: Path | None = None


def policy_at(named: str) -> Policy:
    """What the path is. UsageError when it is none of the three."""
    from streamrl.telemetry.run_folder import RunFolder

    path = Path(named).expanduser().absolute()
    if path.name.startswith("global_step_"):
        return Policy(checkpoint=path)
    if (path / "config.yaml").is_file():
        return Policy(run=RunFolder.open(path))
    if (path / "config.json").is_file():
        return Policy(folder=path)
    raise UsageError(f"a policy is a checkpoint (global_step_N), a run folder or a folder with a model's config.json, got {path}; correct the path")


def newest_checkpoint(run: RunFolder) -> Path:
    """UsageError when the run has none that is complete."""
    from streamrl.learner import checkpoint_folder

    found = checkpoint_folder.latest(run.checkpoints)
    if found is None:
        raise UsageError(f"a policy comes from a complete checkpoint, got none in {run.checkpoints}; wait for the first one, see trainer.save_freq")
    return found


def config_of(policy: Policy, words: Sequence[str], last: Sequence[str] = ()) -> Config:
    """The saved configuration, then the words, then ``last``; checked."""
    from streamrl.cli.settings import read_settings
    from streamrl.pipeline.checkpoints import CONFIG

    if policy.folder is not None:
        return read_settings(words, [], last)
    saved = policy.checkpoint / CONFIG if policy.checkpoint is not None else policy.run.config if policy.run is not None else None
    if saved is None or not saved.is_file():
        raise UsageError(f"a checkpoint holds {CONFIG}, got none in {policy.checkpoint}; name the run folder or another checkpoint")
    return read_settings(words, [str(saved)], last)

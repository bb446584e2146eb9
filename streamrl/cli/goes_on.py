"""What a run that goes on must keep, told from its files alone: the folder is not claimed yet and nothing in it is written.

Guarantees: settings that an actor would refuse in view of the run's journals or its checkpoint are refused here, in the same words. Left to the actors,
since it means to read whole models and data sets: adapters whose base has other numbers, and data files that were changed under their name.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.errors import CheckpointError, ProtocolError, UsageError

if TYPE_CHECKING:
    from streamrl.config import Config

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")  # of a model: with another one its tensors have other shapes
TODO = "leave it as it was, or start a new run from what `streamrl export` makes of this one"


def check_goes_on(config: Config, run: Path | None, checkpoint: Path | None) -> None:
    """UsageError for what can't go on. ``run``: the folder, if a run lies there; ``checkpoint``: where the models begin, if not with the starting weights."""
    try:
        if run is not None:
            _check_journals(config, run)
        if checkpoint is not None:
            _check_checkpoint(config, checkpoint)
    except (CheckpointError, ProtocolError) as error:
        raise UsageError(str(error)) from error


def _check_journals(config: Config, run: Path) -> None:
    """Each must be one that this version reads; the groups in it have their number of sessions."""
    from streamrl.dataplane import journalled_folder
    from streamrl.replay.journal import FOLDER, journal_files, read_file
    from streamrl.replay.replayed import check_sessions

    ledger = run / FOLDER
    for store in (ledger, *sorted(ledger.glob("store-*/"))):
        journalled_folder(store)
    if files := journal_files(ledger):
        opening, _ = read_file(files[-1])
        check_sessions(opening.spec, config.rollout.n)


def _check_checkpoint(config: Config, checkpoint: Path) -> None:
    from streamrl.config.load import load, resolve
    from streamrl.config.objective import uses_critic
    from streamrl.learner.checkpoint_checks import check_contents, read_progress
    from streamrl.pipeline.checkpoints import CONFIG, read_start

    saved = resolve(load([str(checkpoint / CONFIG)])) if (checkpoint / CONFIG).is_file() else None
    if saved is not None:
        _check_models(config, saved, checkpoint)
    models = ("actor", "critic") if uses_critic(config) else ("actor",)
    check_contents(read_progress(checkpoint), config.actor.checkpoint.loaded, models, checkpoint)
    _check_sizes(config, checkpoint)
    state, _ = read_start(checkpoint)
    if state.cursor and (saved is None or (config.data, config.run.seed) != (saved.data, saved.run.seed)):
        _check_data(config, state.cursor)


def _check_models(config: Config, saved: Config, checkpoint: Path) -> None:
    from streamrl.config.objective import uses_critic

    for key in ("lora_rank", "lora_alpha", "target_modules"):
        now, then = getattr(config.model, key), getattr(saved.model, key)
        if now != then:
            raise UsageError(
                f"$.model.{key}: a run goes on with the weights it has trained, got {now!r} for a checkpoint made with {then!r}, {checkpoint}; {TODO}"
            )
    if uses_critic(config) and not uses_critic(saved):
        raise UsageError(f"$.critic: a run goes on with the models it has trained, got a critic for a checkpoint without one, {checkpoint}; {TODO}")


def _check_sizes(config: Config, checkpoint: Path) -> None:
    """As far as both models are folders here that tell their sizes."""
    from streamrl.telemetry.run_folder import read_json

    now, then = (read_json(folder / "config.json") or {} for folder in (Path(config.model.path), checkpoint / "actor" / "huggingface"))
    other = [f"{key} {now[key]} for {then[key]}" for key in SIZES if key in now and key in then and now[key] != then[key]]
    if other:
        raise UsageError(
            f"$.model.path: a run goes on with the weights it has trained, got a model of other sizes ({', '.join(other)}) for {checkpoint}; "
            "resume with the model it was saved from"
        )


def _check_data(config: Config, cursor: dict[str, object]) -> None:
    """The place in the data means something on the same rows in the same order only. Reads the rows: asked when the settings of the data are others."""
    from streamrl.pipeline.build import build_prompts

    asyncio.run(build_prompts(config).restore(cursor))

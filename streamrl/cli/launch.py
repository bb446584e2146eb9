"""``streamrl launch``: check, claim a run folder, start the actors, train, and say how it ended."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.cli.settings import add_settings, check_surroundings, read_settings
from streamrl.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from streamrl.config import Config


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser("launch", help="train", description=__doc__)
    add_settings(parser, required=False)
    parser.add_argument("--address", metavar="A", help="a running Ray cluster; without it a local one is started and ended with the run")
    parser.add_argument("--run-dir", metavar="D", help="the run folder (default: runs/<name>-<time>); it must not hold a run already")
    parser.add_argument("--resume", metavar="RUN", help="go on with the run in this folder; its saved configuration comes first, CONFIG may be left out")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The summary goes to stdout as a table; the same is in summary.json of the run folder."""
    from streamrl.cli.goes_on import check_goes_on
    from streamrl.config.load import dump
    from streamrl.config.plan import plan
    from streamrl.telemetry.live import format_summary
    from streamrl.telemetry.run_folder import RunFolder

    config = configure(arguments)
    text = plan(config, check_surroundings(config))
    root = Path(config.run.folder or "")
    goes_on = bool(arguments.resume) or (config.trainer.resume_mode == "auto" and (root / "config.yaml").is_file())
    resume = find_checkpoint(config, root if goes_on else None, required=bool(arguments.resume))
    check_goes_on(config, root if goes_on else None, resume)
    from actors import launch

    with RunFolder.create(root, dump(config), text + "\n", resume=goes_on) as folder:
        summary = launch.run(config, folder, resume=resume)
    sys.stdout.write(format_summary(summary))
    return 130 if summary.status == "stopped" else 0


def configure(arguments: argparse.Namespace) -> Config:
    """The configuration with the options folded in; a resumed run starts from its own saved one."""
    if not arguments.settings and not arguments.resume:
        raise UsageError("launch needs a configuration, got none; give a YAML file such as configs/tiny_cpu.yaml, or --resume RUN")
    if arguments.resume and arguments.run_dir:
        raise UsageError("--resume and --run-dir exclude each other, got both: a resumed run goes on in its own folder; give one of them")
    first, options = [], {"cluster.address": arguments.address, "run.folder": arguments.run_dir}
    if arguments.resume:
        from streamrl.telemetry.run_folder import RunFolder

        folder = RunFolder.open(arguments.resume)
        first, options["run.folder"] = [str(folder.config)], str(folder.root)
    return read_settings(arguments.settings, first, [f"{key}={json.dumps(value)}" for key, value in options.items() if value is not None])


def find_checkpoint(config: Config, run: Path | None, *, required: bool) -> Path | None:
    """The checkpoint to start from: the newest of ``run``, or what trainer.resume_from_path names (a checkpoint or a run folder).

    None: with the starting weights, a run that has a journal goes on from there.
    """
    from streamrl.learner import checkpoint_folder
    from streamrl.replay.journal import FOLDER, journal_files

    if run is not None:
        found = checkpoint_folder.latest(run / "checkpoints")
        if found is None and required and not journal_files(run / FOLDER):
            raise UsageError(f"resuming needs a complete checkpoint or a journal, got neither in {run}; launch the run anew in another folder")
        return found
    if config.trainer.resume_mode != "resume_path":
        return None
    named = Path(config.trainer.resume_from_path or "")
    if (named / "checkpoints").is_dir():
        if (found := checkpoint_folder.latest(named / "checkpoints")) is None:
            raise UsageError(f"$.trainer.resume_from_path: needs a complete checkpoint, got none in {named / 'checkpoints'}; name another one")
        return found
    try:
        checkpoint_folder.check(named)
    except CheckpointError as error:
        raise UsageError(f"$.trainer.resume_from_path: {error}") from error
    return named

"""``streamrl inspect``: what a data file, a run or one trajectory holds, layer by layer, and which rule is broken where. Reads only.

TARGET is a data file (parquet, json, jsonl), a configuration (its training files) or a run folder; KEY names a trajectory or a group (uid)
of a run's sampled steps. Exit code 0 when every line is OK, 1 when a rule is broken, 2 for a mistake of the call or a bad row of a data file.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.errors import UsageError

if TYPE_CHECKING:
    from streamrl.cli.inspect_print import Page
    from streamrl.config import Config
    from streamrl.telemetry.run_folder import RunFolder
    from streamrl.telemetry.samples import Sample

SHOWN_KEYS = 8


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser("inspect", help="look into a data file, a run or a trajectory", description=__doc__)
    parser.add_argument("target", metavar="TARGET", help="a data file, a configuration or a run folder")
    parser.add_argument("key", metavar="KEY", nargs="?", help="a trajectory key or a uid of a sampled step")
    parser.add_argument("--row", metavar="N", type=int, help="also show row N of the data, counted from 0")
    parser.add_argument("--step", metavar="S", type=int, help="the sampled step to look at (default: the newest)")
    parser.add_argument("--no-color", action="store_true", help="plain text; NO_COLOR does the same")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Everything goes to stdout."""
    from streamrl.cli.inspect_print import Page
    from streamrl.config.paths import is_url, resolve_source

    logging.getLogger("torch.fx._symbolic_trace").disabled = True  # torch's note to its own developers at the first jagged tensor
    target, page = str(arguments.target), Page(color=not arguments.no_color)
    if Path(target).is_dir():
        if arguments.row is not None:
            raise UsageError(f"--row counts rows of a data file, got the run folder {target}; name a trajectory by its key")
        return inspect_run(Path(target), arguments.key, arguments.step, page)
    if not is_url(target) and not os.path.exists(resolve_source(target)):
        raise UsageError(f"TARGET is a data file, a configuration or a run folder, got {target}, where there is none; correct the path")
    if arguments.key is not None or arguments.step is not None:
        raise UsageError(f"keys and steps belong to a run folder, got {target}; give the folder of a run, or --row N for a row of the data")
    return inspect_data(target, arguments.row, page)


def inspect_data(target: str, number: int | None, page: Page) -> int:
    """Layers, columns of the collated batch, and one row in full when asked for."""
    from streamrl.cli.inspect_data import collated, data_layers, read, row_fields
    from streamrl.protocol.tensors import describe

    data, rows = read(target)
    if number is not None and not 0 <= number < len(rows):
        raise UsageError(f"--row is a row of the data, 0 to {len(rows) - 1}, got {number}; choose one of them")
    page.line(target, "bold")
    fine = page.layers(data_layers(rows, data))
    page.heading("columns of a batch")
    page.columns([describe(name, column) for name, column in collated(rows, data).items()])
    if number is not None:
        page.heading(f"row {number}")
        page.fields(row_fields(rows[number], data))
    return 0 if fine else 1


def inspect_run(target: Path, key: str | None, step: int | None, page: Page) -> int:
    """The layers of a sampled step, or one of its trajectories."""
    from streamrl.cli.inspect_run import run_layers, sampled_rows
    from streamrl.config.load import load
    from streamrl.protocol.tensors import describe
    from streamrl.telemetry.run_folder import RunFolder

    folder = RunFolder.open(target)
    config = load([folder.config])
    sample = find_sample(folder, key, step)
    page.line(f"{target}  step {sample.step}, taken at version {sample.version}", "bold")
    if key is not None:
        return _show_rows(sample, key, config, page)
    fine = page.layers(run_layers(sample, config))
    page.heading("trajectories")
    page.trajectories(sampled_rows(sample))
    page.heading("columns")
    page.columns([describe(name, column) for name, column in sample.columns.items()])
    return 0 if fine else 1


def find_sample(folder: RunFolder, key: str | None, step: int | None) -> Sample:
    """The sample of ``step``, else the newest, with ``key`` the newest that holds it. UsageError says which there are."""
    from streamrl.telemetry.samples import read_sample, sample_paths

    paths = sample_paths(folder.samples)
    if not paths:
        raise UsageError(
            f"a step leaves a sample when telemetry.sample_groups is above 0, got none in {folder.root}; wait for a step, or train with a newer version"
        )
    if step is not None and step not in paths:
        raise UsageError(f"--step is a sampled step, got {step}; there are {', '.join(map(str, paths))}")
    seen: list[str] = []
    for number in [step] if step is not None else reversed(paths):
        try:
            sample = read_sample(paths[number])
        except FileNotFoundError:  # the live run has just replaced its oldest one
            continue
        if key is None or chosen_rows(sample, key):
            return sample
        seen += sample.keys
    if key is None:
        raise UsageError(f"the newest sample of {folder.root} went away while it was read, got none; try again")
    more = f" and {len(seen) - SHOWN_KEYS} more" if len(seen) > SHOWN_KEYS else ""
    raise UsageError(f"KEY is a trajectory or a uid of a sampled step, got {key!r}; there are {', '.join(seen[:SHOWN_KEYS])}{more}")


def chosen_rows(sample: Sample, key: str) -> list[int]:
    """Places of the row with this key, or of the rows of the group with this uid."""
    from streamrl.protocol.keys import TrajectoryKey

    return [i for i, name in enumerate(sample.keys) if key in (name, TrajectoryKey.parse(name).uid)]


def _show_rows(sample: Sample, key: str, config: Config, page: Page) -> int:
    from streamrl.cli.inspect_print import STYLES
    from streamrl.cli.inspect_run import sampled_rows
    from streamrl.cli.inspect_tokens import token_decoder
    from streamrl.protocol.tensors import describe, index_select
    from streamrl.protocol.tensors.columns import build, columns_of

    chosen = chosen_rows(sample, key)
    all_rows = sampled_rows(sample)
    part = index_select(build(sample.columns, len(sample.keys)), chosen)
    assert part is not None, "rows of a batch are a batch"
    page.columns([describe(name, column) for name, column in columns_of(part).items()])
    decode, reason = token_decoder(config)
    if reason is not None:
        page.line(reason, STYLES["observation"])
    shown: list[int] | None = None
    for row in (all_rows[i] for i in chosen):
        prompt = row["prompts"].tolist()
        page.heading(f"{row.key}")
        page.conversation(row, decode, with_prompt=prompt != shown)
        shown = prompt
    return 0

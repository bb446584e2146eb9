"""``streamrl status``: how a run stands, from the files of its folder alone, so that it works when the driver hangs or is dead."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrl.telemetry.run_folder import RunFolder
    from streamrl.telemetry.summary import RunStatus

SILENT_S = 10.0  # the driver writes every second; after this long without a word it hangs or is dead


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser("status", help="how a run stands", description=__doc__)
    parser.add_argument("run_folder", metavar="RUN", help="the run folder")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The summary table of an ended run, else the driver's last word and the last step."""
    from streamrl.telemetry.live import format_summary
    from streamrl.telemetry.run_folder import RunFolder
    from streamrl.telemetry.summary import read_summary

    folder = RunFolder.open(arguments.run_folder)
    summary = read_summary(folder.summary)
    sys.stdout.write(format_summary(summary) if summary is not None else describe(folder, time.time()))
    return 0


def describe(folder: RunFolder, now: float) -> str:
    """Two lines about a run without a summary."""
    from streamrl.telemetry.live import format_line
    from streamrl.telemetry.steps import read_steps
    from streamrl.telemetry.summary import read_status

    steps = read_steps(folder.steps)
    return f"{_headline(read_status(folder.status), now)}\n{format_line(steps[-1]) if steps else 'no step yet'}\n"


def _headline(status: RunStatus | None, now: float) -> str:
    if status is None:
        return "the driver has written no status yet"
    silent_s = now - status.updated
    progress = f"step {status.step} of {status.total_steps}, version {status.version}" if status.total_steps else "no step count yet"
    note = f", {status.message}" if status.message else ""
    if silent_s > SILENT_S:
        return f"no word from the driver (pid {status.pid}) for {silent_s:.0f} s; last: {status.state}, {progress}{note}"
    return f"{status.state} for {now - status.started:.0f} s, {progress}{note}"

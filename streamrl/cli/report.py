"""``streamrl report``: a run as one HTML file, to be opened in a browser, sent or printed; no network and no server.

Reads the run folder only, so it works on a run that lives, failed or was copied from elsewhere. With --openmetrics it also writes the recording as
text that ``promtool tsdb create-blocks-from openmetrics`` takes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.errors import UsageError

if TYPE_CHECKING:
    from streamrl.telemetry.run_folder import RunFolder

NAME = "report.html"


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser("report", help="a run as one HTML page", description=__doc__)
    parser.add_argument("run_folder", metavar="RUN", help="the run folder")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help=f"the page (default: {NAME} in the run folder)")
    parser.add_argument("--samples", metavar="N", type=int, default=12, help="sample trajectories to show, newest step first (default: 12; 0: none)")
    parser.add_argument("--openmetrics", metavar="FILE", help="write the recording as OpenMetrics text instead of the page; - for stdout")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Writes one file and says where it is."""
    from streamrl.telemetry.run_folder import RunFolder

    folder = RunFolder.open(arguments.run_folder)
    if arguments.openmetrics:
        return write_recording(folder, arguments.openmetrics)
    path = arguments.output or folder.root / NAME
    size = save(path, page(folder, arguments.samples))
    sys.stdout.write(f"{path} ({size / 1e6:.1f} MB)\n")
    return 0


def page(folder: RunFolder, num_samples: int) -> str:
    """The page's text."""
    from streamrl.cli.report_samples import read_samples
    from streamrl.report.collect import collect
    from streamrl.report.page import render

    return render(collect(folder, samples=read_samples(folder, num_samples), diagnosis=diagnosis_of(folder)))


def diagnosis_of(folder: RunFolder) -> str:
    """What `streamrl why` says of a run that is stuck, and how one that ended early goes on; nothing for a run in order."""
    from streamrl.diagnosis import diagnose, read_view

    found = diagnose(read_view(folder))
    if found.is_alarm:
        return f"{found.verdict}: {found.headline}" + (f". Next: {found.next_step}" if found.next_step else "")
    return f"it ended early; {found.next_step}" if found.verdict == "ended" and found.next_step else ""


def save(path: Path, text: str) -> int:
    """Replace the file in one step, so that a browser never reads half of it. A device or pipe is written to. UsageError when that is impossible."""
    from streamrl.telemetry.run_folder import write_text

    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            write_text(path, text)
    except OSError as error:
        raise UsageError(f"the page is written to a file in a folder that exists, got {path} ({error}); name another with -o") from error
    return len(text.encode())


def write_recording(folder: RunFolder, target: str) -> int:
    """OpenMetrics text of the whole recording."""
    from streamrl.telemetry.openmetrics import write_openmetrics
    from streamrl.telemetry.recording import read_recording

    recording = read_recording(folder)
    if not recording.times:
        raise UsageError(f"--openmetrics writes the run's recording, got none in {folder.metrics}; the run has not begun or was made without one")
    if target == "-":
        write_openmetrics(recording, sys.stdout)
        return 0
    try:
        with open(target, "w", encoding="utf-8") as file:
            write_openmetrics(recording, file)
    except OSError as error:
        raise UsageError(f"--openmetrics names a file that can be written, got {target} ({error}); name another, or - for stdout") from error
    return 0

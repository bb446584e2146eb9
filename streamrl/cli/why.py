"""``streamrl why``: who waits for whom in a run, since when and until when, down to the culprit, and what to do next.

Reads the files of the run folder alone, so it works when the driver hangs or is dead. Exit code 0 while the run starts, goes on or has ended; 1 when it is
stuck, or a file that would tell is missing or cannot be read (cut off, or of another version); 2 when RUN is no run folder. A run that has ended needs its
summary.json alone. With --stacks the processes that matter write where each of their threads stands, hung ones too.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrl.diagnosis import Diagnosis
    from streamrl.telemetry.run_folder import RunFolder
    from streamrl.telemetry.summary import RunStatus


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser("why", help="why a run does not go on", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_folder", metavar="RUN", help="the run folder")
    parser.add_argument("--stacks", action="store_true", help="also where every thread of the culprit stands")
    parser.add_argument("--all-stacks", action="store_true", help="the same of every actor of the run")
    parser.add_argument("--json", action="store_true", help="the diagnosis as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the diagnosis."""
    import msgspec

    from streamrl.diagnosis import diagnose, read_view
    from streamrl.diagnosis.printing import format_diagnosis
    from streamrl.telemetry.run_folder import RunFolder

    folder = RunFolder.open(arguments.run_folder)
    view = read_view(folder)
    found = diagnose(view)
    if arguments.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    else:
        sys.stdout.write(f"{_standing(view)}{format_diagnosis(found)}\n")
    if arguments.stacks or arguments.all_stacks:
        sys.stdout.write(_stacks(folder, found, view.status, everyone=arguments.all_stacks))
    return 1 if found.verdict in ("stuck", "unknown") else 0


def _standing(view: Any) -> str:
    """One line: how far the run is."""
    from streamrl.diagnosis.result import span

    status = view.status
    if status is None or view.has_ended:
        return ""
    steps = f"step {status.step} of {status.total_steps}" if status.total_steps else f"step {status.step}"
    idle_s = view.idle_s()
    last = f"; the last step or session ended {span(idle_s)} before the newest word" if idle_s is not None else ""
    return f"{status.state}, {steps}, version {status.version}; newest word {span(max(0.0, view.now - status.updated))} ago{last}\n"


def _stacks(folder: RunFolder, found: Diagnosis, status: RunStatus | None, everyone: bool) -> str:
    from streamrl.diagnosis import stacks
    from streamrl.diagnosis.view import read_processes

    actors = list(read_processes(folder)) if everyone else [name for name in found.suspects if name != "driver"]
    told = stacks.ask(folder, actors)
    if status is not None and (everyone or "driver" in found.suspects):
        told["driver"] = stacks.ask_driver(folder, status.pid)
    where = {name: f" (also in {dump.file} of the run folder)" if dump.file else "" for name, dump in told.items()}
    return "".join(f"\n--- {name}{where[name]}\n{dump.text}\n" for name, dump in told.items())

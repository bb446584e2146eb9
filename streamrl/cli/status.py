"""``streamrl status``: how a run stands, from the files of its folder alone, so that it works when the driver hangs or is dead."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrl.diagnosis import RunView
    from streamrl.telemetry.run_folder import RunFolder
    from streamrl.telemetry.summary import RunStatus

LONG_S = 10.0  # a wait that is worth a line


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
    """Two lines about a run without a summary, and a third one when something is late."""
    from streamrl.diagnosis import read_view
    from streamrl.telemetry.steps import read_last_step
    from streamrl.telemetry.summary import read_status

    read_status(folder.status)  # one that cannot be read is refused; a view has none then
    view = read_view(folder, now)
    lines = [_headline(view), _step_line(read_last_step(folder.steps), view.status), longest_wait(folder, view)]
    return "".join(f"{line}\n" for line in lines if line)


def _step_line(step: dict[str, Any] | None, status: RunStatus | None) -> str:
    """The last step. Said to be so where the headline names another one: after a resume, or when the log of steps can't be written."""
    from streamrl.telemetry.live import format_line

    if step is None:
        return "no step yet"
    if status is None or step.get("step") == status.step:
        return format_line(step)
    by = ", by an earlier driver" if step.get("time", status.started) < status.started else ""
    return f"newest step line{by}: {format_line(step)}"


def _headline(view: RunView) -> str:
    from streamrl.diagnosis.driver import last_word, standing, trouble
    from streamrl.protocol.waits import one_line

    if view.status is None:
        return "the driver has written no status yet"
    note = f", {one_line(view.status.message)}" if view.status.message and not view.has_ended else ""
    said = trouble(view)
    return f"{said}; last: {last_word(view)}{note}" if said else f"{standing(view)}{note}"


def longest_wait(folder: RunFolder, view: RunView) -> str:
    """Who had waited longest when the driver last asked, and for what; empty while the run goes on, and when the file of the waits can't be read."""
    from streamrl.diagnosis import diagnose
    from streamrl.errors import UsageError
    from streamrl.protocol.waits import one_line
    from streamrl.telemetry.run_folder import read_json

    if diagnose(view).verdict not in ("waiting", "stuck"):
        return ""
    try:
        table = read_json(folder.waits)
        rows = [row for health in table["actors"].values() if health for row in health["waits"]]
        oldest = min(rows, key=lambda row: row["since"])
        limit = f", limit {oldest['limit_s']:.0f} s" if oldest.get("limit_s") else ""
        waited_s = max(0.0, table["time"] - oldest["since"])
        if waited_s < LONG_S:
            return ""
        words = f"{oldest['waiter']} has waited longest: {waited_s:.0f} s for {oldest['what']} of {oldest['on']}{limit}"
    except (UsageError, TypeError, KeyError, ValueError, AttributeError):
        return ""
    return f"{one_line(words)}; `streamrl why {shlex.quote(str(folder.root))}` names the cause"

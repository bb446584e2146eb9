"""``streamrl top``: a run, live: who does what, how fast, how stale, what is dropped, what is waited for. Refreshed every second, Ctrl-C ends it.

Reads the run folder and the actors' metric pages that ``metrics/targets.json`` names. When no page answers, because the run has ended or its processes
are dead, it shows the end of the recording and says how old that is. It asks nothing of the driver, so it works when that hangs.
One frame, and an end, with ``--once``, when stdout is no terminal, and of a run that has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from streamrl.cli.top_pages import Pages
    from streamrl.telemetry.run_folder import RunFolder

REFRESH_S = 1.0
PLAIN_WIDTH = 120  # of a frame that goes to a file or a pipe


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser("top", help="a run, live", description=__doc__)
    parser.add_argument("run_folder", metavar="RUN", help="the run folder")
    parser.add_argument("--once", action="store_true", help="one frame")
    parser.add_argument("--width", type=int, metavar="N", help=f"columns of a frame (default: the terminal's, {PLAIN_WIDTH} without one)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0 when the run was shown, however it stands."""
    from rich.console import Console

    from streamrl.telemetry.run_folder import RunFolder

    folder = RunFolder.open(arguments.run_folder)
    is_terminal = sys.stdout.isatty()
    width = arguments.width or (None if is_terminal else PLAIN_WIDTH)
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    try:
        asyncio.run(_show(folder, console, once=arguments.once or not is_terminal))
    except KeyboardInterrupt:
        return 0
    return 0


async def _show(folder: RunFolder, console: Console, *, once: bool) -> None:
    from rich.live import Live

    from streamrl.cli.top_pages import Pages

    async with Pages(folder) as pages:
        drawn, ended = await _frame(folder, pages, console, patient=once)
        try:
            if not once and not ended:
                with Live(drawn, console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
                    while not ended:
                        started = time.monotonic()
                        drawn, ended = await _frame(folder, pages, console)
                        live.update(drawn, refresh=True)
                        await asyncio.sleep(max(0.0, REFRESH_S - (time.monotonic() - started)))
        finally:
            console.print(drawn)  # it stays on the terminal


async def _frame(folder: RunFolder, pages: Pages, console: Console, *, patient: bool = False) -> tuple[RenderableType, bool]:
    """The frame, and whether it is the last one. A rate needs two scrapes: ``patient`` waits for the second."""
    from streamrl.cli.top_frame import frame
    from streamrl.cli.top_snapshot import snapshot

    recording, is_live = await pages.look()
    if patient and is_live and len(recording.times) < 2:
        await asyncio.sleep(REFRESH_S)
        recording, is_live = await pages.look()
    shot = snapshot(folder, recording, is_live, time.time())
    return frame(shot, console.width), shot.has_ended

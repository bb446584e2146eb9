"""``run(config)``: one training job from the first process to the summary. The driver imports no torch.

    folder → Ray (own or joined) → Supervisor(start, watch, close) → summary.json

Ctrl-C (or SIGTERM) once: finish the step, save, close within ``cluster.stop_timeout_s``. Twice: end at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import psutil

from actors import children
from actors.board import Board
from actors.cluster import Cluster
from actors.store import adoptable
from actors.supervisor import Supervisor
from streamrl.config import Config
from streamrl.config.objective import objective
from streamrl.dataplane.sweep import PREFIX, open_folder, sweep
from streamrl.diagnosis import stacks
from streamrl.errors import CheckpointError, StreamrlError, UsageError
from streamrl.pipeline.build import weights_dir
from streamrl.pipeline.standing import read_standing
from streamrl.replay.journal import journal_files
from streamrl.telemetry import logs
from streamrl.telemetry.run_folder import RunFolder, write_json
from streamrl.telemetry.summary import RunSummary, read_status, read_summary

log = logging.getLogger(__name__)

GONE_S = 2.0  # after the processes of a run were killed, until what they hold is removed
ECHO_S = 0.1  # tools that end a job signal the process and its group: the same request, not a second one


def run(config: Config, folder: RunFolder, *, resume: Path | None = None) -> RunSummary:
    """Run a resolved configuration in ``folder``; ``resume`` is a checkpoint folder. Raises what ended the run, after the summary was written.

    A folder that was run in before goes on where its journals end: with its rows, if they are still in shared memory, and without them otherwise.
    """
    logs.setup("driver", file=folder.log_file("driver"), level=config.telemetry.log_level)
    stacks.register(folder, "driver")
    board = Board(config, folder)
    cluster = Cluster(config, folder.run_id)
    error: StreamrlError | None = None
    status = "failed"
    try:
        board.say(f"run folder {folder.root}")
        board.catch_up()
        if resume is None and journal_files(folder.ledger):
            board.say(_begins_again(config, folder))
        board.say(f"objective: {objective(config)}")
        board.state("starting")
        _clear_leftovers(config, folder)
        _open_weights(config, folder)
        cluster.connect()
        places = cluster.place()
        board.state("running")
        stopped = asyncio.run(_supervise(Supervisor(config, folder, board, resume, places)))
        status = "stopped" if stopped else "completed"
    except StreamrlError as failure:
        error = failure
    finally:
        cluster.disconnect()
        _clear_leftovers(config, folder)
        _remove_shared_memory(config, folder, keep=adoptable(folder) if status == "failed" else [])
    if status != "completed":
        board.hear_the_rest()
    summary = board.summary(status, error)
    board.close(_earlier_result(board, folder) or summary)
    folder.earlier_summary.unlink(missing_ok=True)
    if error is not None:
        raise error
    return summary


def _begins_again(config: Config, folder: RunFolder) -> str:
    """Rows stay where the trained groups, which come first, leave them within the bound: when fewer steps than that were trained. ``replay/restart.py``."""
    try:
        steps = read_standing(folder.standing).totals.stats.trained // config.data.train_batch_size
    except CheckpointError:
        steps = 0
    again = "no checkpoint: going on with the starting weights from step 0; "
    if steps < config.replay.max_staleness:
        return (
            f"{again}finished groups are kept as far as replay.max_staleness={config.replay.max_staleness} allows, trained ones come back to be trained again"
        )
    return (
        f"{again}the prompts of trained and of finished groups come back and are generated again: after {steps} step{'s' if steps != 1 else ''} no row would "
        f"be within replay.max_staleness={config.replay.max_staleness} when its turn comes"
    )


def _earlier_result(board: Board, folder: RunFolder) -> RunSummary | None:
    """What a resumed run that never began leaves as it was: the result of a life that had ended well, and then the settings are those of that life too."""
    try:
        earlier = read_summary(folder.earlier_summary)
    except UsageError:
        return None
    if earlier is None or earlier.status == "failed":
        return None
    board.say("nothing was trained: the run folder has the settings and the result that it had; give what you changed again when you resume it")
    return earlier


async def _supervise(supervisor: Supervisor) -> bool:
    """Run under signal handlers; True when a stop was asked for."""
    loop = asyncio.get_running_loop()
    asked: list[float] = []

    def interrupted() -> None:
        if asked and loop.time() - asked[-1] < ECHO_S:
            return
        asked.append(loop.time())
        if len(asked) > 1:
            _end_at_once(supervisor.config, supervisor.folder)
        supervisor.request_stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted)
    try:
        await supervisor.run()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return bool(asked)


def _end_at_once(config: Config, folder: RunFolder) -> None:
    """The second interrupt: kill every process of the run and leave. An own Ray ends with this process."""
    _say_interrupted(folder)
    records = sorted(folder.children.glob("*.json"))
    processes = children.recorded(records)
    for path in records:
        children.end_leftovers(path, wait_s=0.5)
    psutil.wait_procs(processes, timeout=GONE_S)  # one that still lives could make its files again
    _remove_shared_memory(config, folder)
    sys.stderr.write("ended at once; nothing was saved after the last checkpoint\n")
    os._exit(130)


def _say_interrupted(folder: RunFolder) -> None:
    """The driver's last word, for those who ask later whether it crashed."""
    try:
        status = read_status(folder.status)
        if status is not None:
            write_json(folder.status, msgspec.structs.replace(status, state="interrupted", updated=time.time(), message=""))
    except (OSError, UsageError) as error:
        log.warning("status.json could not be written: %s", error)


def _clear_leftovers(config: Config, folder: RunFolder) -> None:
    """Processes, sockets and shared memory of this run's earlier life, and shared memory of runs whose driver is dead."""
    for path in folder.children.glob("*.json"):
        children.end_leftovers(path)
    shutil.rmtree(folder.sockets, ignore_errors=True)
    sweep(Path(config.dataplane.shm_dir), keep=adoptable(folder))


def _remove_shared_memory(config: Config, folder: RunFolder, keep: Iterable[Path] = ()) -> None:
    """Segments and snapshots of this run, also those whose owner could not remove them, but none of ``keep``."""
    kept = {path.name for path in keep}
    mine = re.compile(rf"{PREFIX}{re.escape(folder.run_id)}-([0-9a-f]{{16}}|weights)")
    for path in Path(config.dataplane.shm_dir).iterdir():
        if mine.fullmatch(path.name) and path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _open_weights(config: Config, folder: RunFolder) -> Path:
    """The folder for weight snapshots, owned by this process, so that a later run may sweep it when this one is gone."""
    return open_folder(weights_dir(config, folder.run_id), os.getpid())

"""The second Ctrl-C: nothing of the run is left, and its files say that it was interrupted and did not crash."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from actors import children, launch
from streamrl.pipeline.build import weights_dir
from streamrl.telemetry.run_folder import RunFolder, read_json, write_json
from streamrl.telemetry.summary import RunStatus, read_status
from tests.pipeline.tiny import tiny_config

STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("begun", flush=True)
while True:  # an actor in the middle of a snapshot
    os.makedirs(sys.argv[1], exist_ok=True)
    time.sleep(0.001)
"""


def test_what_a_second_ctrl_c_leaves(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    folder.children.mkdir(parents=True)
    config = tiny_config(f"dataplane.shm_dir={tmp_path}")
    snapshots = weights_dir(config, folder.run_id)
    write_json(folder.status, RunStatus(state="running", pid=7, started=100.0, updated=160.0, step=3, total_steps=60, version=3, message="waits"))
    actor = subprocess.Popen([sys.executable, "-c", STUBBORN, str(snapshots)], stdout=subprocess.PIPE, text=True)
    try:
        assert actor.stdout.readline() == "begun\n"
        record = folder.children / "learner-0.json"
        children.record(record, [actor.pid])
        left = msgspec.json.decode(record.read_bytes(), type=children.Record)
        mine = [child for child in left.processes if child.pid == actor.pid]  # this process goes on
        record.write_bytes(msgspec.json.encode(msgspec.structs.replace(left, processes=mine)))

        def leave(code: int) -> None:
            raise SystemExit(code)

        monkeypatch.setattr(os, "_exit", leave)
        with pytest.raises(SystemExit, match="130"):
            launch._end_at_once(config, folder)
        assert not psutil.pid_exists(actor.pid) or psutil.Process(actor.pid).status() == psutil.STATUS_ZOMBIE
        time.sleep(0.05)
        assert not snapshots.exists() and list(folder.children.iterdir()) == []
    finally:
        actor.kill()
        actor.wait()
    status = read_status(folder.status)
    assert (status.state, status.step, status.pid, status.message) == ("interrupted", 3, 7, "") and status.updated > 160.0
    assert read_json(folder.summary) is None


def test_a_run_that_was_interrupted_before_it_said_anything_has_no_status(tmp_path):
    launch._say_interrupted(RunFolder(tmp_path))
    assert list(Path(tmp_path).iterdir()) == []

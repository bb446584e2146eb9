"""Processes and shared memory that an actor leaves behind are ended by what it wrote down."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from actors import children

CHILD = """
import sys, time
from multiprocessing import resource_tracker, shared_memory
block = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(block._name, "shared_memory")  # nobody cleans up: what a killed tracker leaves
print(block.name, flush=True)
time.sleep(60)
"""


def test_a_recorded_process_is_ended_and_its_shared_memory_removed(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    name = child.stdout.readline().strip()
    path = tmp_path / "rollout-0.json"
    children.record(path, [child.pid])
    assert (Path("/dev/shm") / name).exists()
    kept = path.read_bytes().replace(b'"pid":%d,' % os.getpid(), b'"pid":999999999,')  # the recording process itself goes on here
    path.write_bytes(kept)
    assert children.end_leftovers(path, wait_s=2.0) >= 1
    assert child.wait(5) is not None
    assert not (Path("/dev/shm") / name).exists() and not path.exists()


def test_a_recycled_pid_is_never_ended(tmp_path):
    path = tmp_path / "rollout-0.json"
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        path.write_text(f'{{"processes": [{{"pid": {bystander.pid}, "started": 1.0}}], "shared_files": []}}')
        assert children.end_leftovers(path, wait_s=0.5) == 0
        assert psutil.Process(bystander.pid).is_running()
    finally:
        bystander.kill()
        bystander.wait()

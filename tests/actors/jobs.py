"""Real runs of the command line as subprocesses, watched through the files of their run folder, as a user would."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from actors import children
from streamrl.telemetry.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "tiny_cpu.yaml"
ROWS = ("data.train_batch_size=16", "actor.ppo_mini_batch_size=16", "data.val_max_samples=32", "learner.num_threads=1", "run.seed=7")
SMALL = ("trainer.total_training_steps=3", *ROWS)


class Job:
    """One ``streamrl launch``; ``folder`` is its run folder."""

    def __init__(self, folder: Path, *arguments: str, config: Path | None = TINY, python: str = sys.executable) -> None:
        self.folder = folder
        files = [str(config)] if config else []
        self.started = time.monotonic()
        self._said = tempfile.TemporaryFile("w+")  # a pipe that nobody reads would hold a long run up
        self.process = subprocess.Popen(
            [python, "-m", "streamrl.cli.main", "launch", *files, *arguments],
            cwd=ROOT,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        self.output = ""

    def wait(self, limit_s: float = 150) -> int:
        """Exit code; the output is in ``output``. Ends the process when it takes longer."""
        try:
            self.process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"the run must end within {limit_s} s, got:\n{self.said()[-3000:]}") from None
        self.output = self.said()
        return self.process.returncode

    def said(self) -> str:
        """What it wrote so far, to both streams."""
        self._said.seek(0)
        return self._said.read()

    def until(self, condition: Callable[[], Any], limit_s: float = 90) -> Any:
        """Wait for a condition on the run's files."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            try:
                if result := condition():
                    return result
            except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError):
                pass
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended early with {self.process.returncode}:\n{self.said()[-3000:]}")
            time.sleep(0.05)
        raise AssertionError(f"the condition must hold within {limit_s} s")

    def steps(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics" / "steps.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def trained_steps(self) -> list[int]:
        return [record["step"] for record in self.steps() if "reward" in record]

    def health(self, actor: str) -> dict[str, Any]:
        return json.loads((self.folder / "waits.json").read_text())["actors"][actor]

    def kill(self, actor: str) -> None:
        os.kill(self.until(lambda: self.health(actor)["pid"]), signal.SIGKILL)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def stop(self, limit_s: float = 45) -> None:
        """Ask a run that still goes on to end in order; then to end at once; then kill it."""
        for number, wait_s in ((signal.SIGINT, limit_s), (signal.SIGINT, 10.0)):
            if self.process.poll() is None:
                self.process.send_signal(number)
                try:
                    self.process.wait(wait_s)
                except subprocess.TimeoutExpired:
                    continue
        self.end()
        self.output = self.said()

    def end(self) -> None:
        """For fixtures: nothing of the run survives the test."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Interrupted(Exception):
    """This process was asked to end while a run of it goes on."""


@contextlib.contextmanager
def raised_signals() -> Iterator[None]:
    """SIGINT and SIGTERM raise Interrupted, once: what follows the first one ends this process as ever."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def interrupt(number: int, _frame: object) -> None:
        restore()
        raise Interrupted(f"{signal.Signals(number).name} came")

    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        restore()


def clear(folder: Path) -> None:
    """End the processes and remove the shared memory of a run whose driver is gone and that nobody will resume."""
    for path in RunFolder(folder).children.glob("*.json"):
        children.end_leftovers(path)
    for name in shared_memory_of(folder):
        shutil.rmtree(Path("/dev/shm") / name, ignore_errors=True)


def shared_memory_of(folder: Path) -> list[str]:
    """Names in shared memory that belong to the run."""
    return [name for name in os.listdir("/dev/shm") if RunFolder(folder).run_id in name]


def processes_of(folder: Path) -> list[psutil.Process]:
    """Processes whose command line or environment names the run folder, the test itself excepted."""
    found = []
    for process in psutil.process_iter(["pid"]):
        try:
            text = " ".join(process.cmdline())
            if process.pid != os.getpid() and re.search(re.escape(str(folder)), text):
                found.append(process)
        except psutil.Error:
            continue
    return found

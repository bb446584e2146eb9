"""Kills random actors, and the driver, of one run at random moments, and says what that cost.

    python -m tests.actors.chaos --kills 50

After every kill the audit must close. A killed driver is followed by ``launch --resume``. The same run, undisturbed, gives the accuracy to compare
with. Exit code 0 when nothing was lost, nothing trained twice, nothing above the bound, and the run completed with that accuracy. A signal ends the run
in order and prints the report so far, with exit code 1.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from streamrl.cli.audit import audit
from streamrl.cli.audit_report import AuditReport
from streamrl.errors import StreamrlError
from streamrl.replay.journal import FOLDER, journal_files, read_file
from streamrl.telemetry.run_folder import read_json
from tests.actors.jobs import Interrupted, Job, clear, raised_signals

GROUPS = 16  # a step
VICTIMS = ("driver", "store", "replay", "prompt", "trainer", "learner-0", "rollout-0")
STEPS_PER_KILL = 12
STALL_S = 180.0  # without a further step the run counts as hung
ACCURACY_LOSS = 0.1  # against the undisturbed run, on 128 held-out rows: about three standard deviations


class Chaos:
    """One run and what is done to it."""

    def __init__(self, folder: Path, kills: int, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.left = kills
        self.steps = STEPS_PER_KILL * kills + 20
        self.settings = [
            f"data.train_batch_size={GROUPS}",
            f"actor.ppo_mini_batch_size={GROUPS}",
            f"trainer.total_training_steps={self.steps}",
            "trainer.save_freq=10",
            "data.val_max_samples=128",
            f"run.seed={seed}",
            f"cluster.max_restarts={kills}",
        ]
        self.kills: Counter[str] = Counter()
        self.errors: list[str] = []
        self.failed_launches = 0
        self.restarts = 0  # of actors, as the launches named them
        self.checks = 0  # audits on the way
        self.job = Job(self.folder, f"--run-dir={self.folder}", *self.settings)

    def run(self) -> Job:
        """To the end of the run, with as many kills as come before it."""
        job = self.job
        launched_at = 0
        while job.process.poll() is None:
            self.wait_for_progress(job, launched_at)
            time.sleep(self.random.uniform(0.0, 6.0))
            if job.process.poll() is not None or not self.left:
                break
            if self.kill(job, self.random.choice(VICTIMS)):
                launched_at = len(job.trained_steps())
                self.restarts += restarts(job)
                job = self.job = Job(self.folder, "--resume", str(self.folder), config=None)
            self.check()
            self.checks += 1
        while (code := job.wait(STALL_S * 4)) != 0:
            self.failed_launches += 1
            self.errors.append(f"launch ended with {code}: {(job.output.splitlines() or ['it said nothing'])[-1]}")
            self.restarts += restarts(job)
            if self.failed_launches > 3:
                break
            job = self.job = Job(self.folder, "--resume", str(self.folder), config=None)
        self.check()
        self.restarts += restarts(job)
        return job

    def wait_for_progress(self, job: Job, known: int) -> None:
        """A launch has trained a step, so that there is something to kill."""
        deadline = time.monotonic() + STALL_S
        while job.process.poll() is None and len(job.trained_steps()) <= known:
            if time.monotonic() > deadline:
                self.errors.append(f"no step was trained within {STALL_S:g} s after step {known}")
                job.end()
            time.sleep(0.1)

    def kill(self, job: Job, victim: str) -> bool:
        """Whether the driver was killed."""
        try:
            pid = job.process.pid if victim == "driver" else job.health(victim)["pid"]
            os.kill(pid, signal.SIGKILL)
        except (OSError, KeyError, TypeError):
            return False  # just being replaced
        self.left -= 1
        self.kills[victim] += 1
        say(f"killed {victim} after step {(job.trained_steps() or [0])[-1]}; {self.left} kills left")
        if victim != "driver":
            return False
        job.process.wait()
        return True

    def check(self) -> AuditReport:
        report = audit(self.folder)
        if not report.closes:
            say(f"the ledger does not close: {report.differences}")
            self.errors += report.differences
        return report


def trained_twice(folder: Path) -> list[str]:
    """Groups that were trained again without having been rolled back."""
    times: Counter[str] = Counter()
    twice: set[str] = set()
    for path in journal_files(folder / FOLDER):
        opening, calls = read_file(path)
        if opening.anew:
            times.clear()
        for call in calls:
            for fate in call.fates:
                times[fate.uid] += {"trained": 1, "rolled_back": -1}.get(fate.fate, 0)
                if times[fate.uid] > 1:
                    twice.add(fate.uid)
    return sorted(twice)


def restarts(job: Job) -> int:
    """As the launch named them."""
    return sum(" died; " in line for line in job.said().splitlines())


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the run folders lie (default: a temporary one that is removed)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        root = arguments.folder or Path(made)
        with raised_signals():
            return whole(root, arguments.kills, arguments.seed)


def whole(root: Path, kills: int, seed: int) -> int:
    """The disturbed run, then the undisturbed one, then what they say."""
    began = time.monotonic()
    chaos = Chaos(root / "chaos", kills, seed)
    calm: Job | None = None
    try:
        chaos.run()
        took = time.monotonic() - began
        calm = Job(root / "calm", f"--run-dir={root / 'calm'}", *chaos.settings)
        if calm.wait(STALL_S * 10) != 0:
            chaos.errors.append(f"the undisturbed run failed: {calm.output[-300:]}")
    except Interrupted as signalled:
        took = time.monotonic() - began
        chaos.errors.append(f"{signalled} after {chaos.kills.total()} of {kills} kills: this is the report so far")
    finally:
        for job in (chaos.job, *([calm] if calm else [])):
            job.stop()
            clear(job.folder)
    return report(chaos, took, accuracy_of(calm))


def accuracy_of(job: Job | None) -> float | None:
    """Held-out accuracy of a run that completed."""
    return job.summary()["val_accuracy_last"] if job is not None and job.process.returncode == 0 else None


def report(chaos: Chaos, took: float, undisturbed: float | None) -> int:
    try:
        books = audit(chaos.folder)
    except (StreamrlError, OSError) as error:
        say(f"no result: {error}")
        return 1
    summary = read_json(chaos.folder / "summary.json") or {"status": "unfinished", "steps": (chaos.job.trained_steps() or [0])[-1], "val_accuracy_last": None}
    accuracy = summary["val_accuracy_last"]
    twice = trained_twice(chaos.folder)
    groups = books.groups
    lost = groups.generated - groups.trained - groups.dropped - groups.in_flight
    say(f"kills            {chaos.kills.total()}: " + ", ".join(f"{name} {count}" for name, count in sorted(chaos.kills.items())))
    say(f"time             {took:.0f} s; actors restarted: {chaos.restarts}; launches that failed: {chaos.failed_launches}")
    say(f"status           {summary['status']} after step {summary['steps']} of {chaos.steps}")
    say(f"ledger closes    {'yes' if books.closes else 'NO'} at the end; audited {chaos.checks} times on the way")
    say(f"groups           generated {groups.generated}, trained {groups.trained} of at most {chaos.steps * GROUPS}, dropped {groups.dropped}")
    say(f"trained twice    {len(twice)}; lost {lost}; rolled back and trained again {books.rolled_back_groups}")
    say(f"largest lag      {books.lag_max} (bound {books.max_staleness})")
    say(f"accuracy         {accuracy} (undisturbed {'unknown' if undisturbed is None else undisturbed})")
    if summary["status"] == "completed" and groups.in_flight:
        chaos.errors.append(f"a completed run holds no group any more, got {groups.in_flight} in flight: who leased them is dead and nobody noticed")
    if accuracy is not None and undisturbed is not None and accuracy < undisturbed - ACCURACY_LOSS:
        chaos.errors.append(f"the accuracy may be {ACCURACY_LOSS} below the undisturbed run's, got {accuracy} against {undisturbed}")
    for error in chaos.errors[:20]:
        say(f"error            {error}")
    good = books.closes and not twice and not lost and books.lag_max <= books.max_staleness and summary["status"] == "completed"
    return 0 if good and not chaos.errors else 1


if __name__ == "__main__":
    sys.exit(main())

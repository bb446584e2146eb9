"""A long run in which nothing is wrong: whoever asks why must hear of no alarm, and the driver must say nothing by itself.

    python -m tests.actors.healthy --minutes 20
    python -m tests.actors.healthy --minutes 20 --config configs/tiny_tools_cpu.yaml rollout.num_actors=2

The run is launched as a user would and asked every two seconds through its run folder, as ``streamrl why`` does. Exit code 0 when no diagnosis was an
alarm, the driver's log has none, and the run goes on until it is stopped.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from streamrl.diagnosis import Diagnosis, diagnose, read_view
from streamrl.telemetry.run_folder import RunFolder
from tests.actors.jobs import TINY, Interrupted, Job, clear, raised_signals

EVERY_S = 2.0
SETTINGS = ("trainer.total_training_steps=1000000", "trainer.save_freq=50", "trainer.test_freq=100", "data.val_max_samples=32", "run.seed=5")


def ask(folder: RunFolder, minutes: float, job: Job) -> list[Diagnosis]:
    """What the run says of itself until the time is up; alarms are printed as they come."""
    found: list[Diagnosis] = []
    deadline = time.monotonic() + minutes * 60
    while time.monotonic() < deadline and job.process.poll() is None:
        if folder.config.is_file():
            found.append(diagnose(read_view(folder)))
            if found[-1].is_alarm:
                say(f"ALARM: {found[-1]}")
        time.sleep(EVERY_S)
    return found


def report(found: list[Diagnosis], said: str) -> int:
    """The number of false alarms."""
    say(f"{len(found)} diagnoses: {dict(Counter(one.verdict for one in found))}")
    for culprit, count in Counter(one.culprit for one in found if one.culprit).most_common(8):
        say(f"  {count:5d} times the slowest part was {culprit}")
    own = [line for line in said.splitlines() if "STUCK:" in line or "WAITING:" in line]
    for line in own:
        say(f"the driver said: {line}")
    return sum(one.is_alarm for one in found) + len(own)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--config", type=Path, default=TINY)
    parser.add_argument("settings", nargs="*", help="more overrides of the configuration")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, raised_signals():
        folder = Path(made) / "run"
        job = Job(folder, f"--run-dir={folder}", *SETTINGS, *arguments.settings, config=arguments.config)
        found: list[Diagnosis] = []
        try:
            found = ask(RunFolder(folder), arguments.minutes, job)
        except Interrupted as signalled:
            say(f"{signalled}: the verdict is on the time so far")
        finally:
            steps = len(job.trained_steps())
            ended = job.process.poll()
            job.stop()
            clear(folder)
        say(f"{steps} steps were trained")
        if ended is not None:
            say(f"error: the run goes on until it is stopped, got its end with {ended}:\n{job.output[-2000:]}")
        false_alarms = report(found, job.output)
        say(f"{false_alarms} false alarms")
        return 1 if false_alarms or ended is not None or not steps else 0


if __name__ == "__main__":
    sys.exit(main())

"""Watches a long, fast run for anything that grows: memory, threads and open files of each process, shared memory, files of the run folder.

    python -m tests.actors.soak --minutes 30

The run is launched as a user would; its answers are scripted, so that hundreds of thousands of rows pass. The warm-up is the first third, and as long
as it takes until replay and store have forgotten their first groups (they remember so many that ended). Of the time after it the high level of the
second half (its 95th percentile: an allocator gives memory back at whim, which moves medians and not peaks) may exceed that of the first by
``GROWTH_SHARE`` or ``GROWTH_BYTES``, whichever is more. Ray's own processes and the ledger, which stays for the audit, are shown and not judged.

Writes soak.csv, and soak.png where matplotlib is installed. Exit code 0 when nothing grew and nothing stayed. It cannot see what grows slower than
that: the slope an hour is printed beside each verdict.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from streamrl.cli.audit import audit
from streamrl.dataplane.partition import MAX_TOMBSTONES
from tests.actors.footprint import RAY, Footprint, footprint, last_step
from tests.actors.jobs import Interrupted, Job, clear, raised_signals, shared_memory_of

MIB = 1 << 20
GROWTH_SHARE = 0.03
GROWTH_BYTES = 8 * MIB
GROWTH_COUNT = 3  # threads, open files, files of a folder
START_S = 180.0
GROUPS = 128  # a step
REMEMBERED_GROUPS = MAX_TOMBSTONES + 10_000
SETTINGS = (
    "rollout.engine=scripted",
    "weights.probe=false",
    "rollout.n=1",  # many groups a second: the bounded memories of ended groups and cleared rows are full within the warm-up
    f"data.train_batch_size={GROUPS}",
    f"actor.ppo_mini_batch_size={GROUPS}",
    "algorithm.adv_estimator=reinforce_plus_plus",
    "algorithm.rollout_correction.bypass_mode=true",
    "algorithm.rollout_correction.rollout_is=null",
    "data.max_response_length=4",
    "data.val_max_samples=16",
    "learner.num_threads=1",
    "trainer.total_training_steps=10000000",
    "trainer.save_freq=100",
    "dataplane.capacity_bytes=134217728",  # small, so that every segment is used again many times
    "dataplane.segment_bytes=4194304",
    "run.seed=5",
)


class Series(NamedTuple):
    """One watched quantity after the warm-up. ``judged`` is False for what belongs to others; ``is_bytes`` tells its unit."""

    name: str
    points: list[tuple[float, float]]
    is_bytes: bool
    judged: bool

    def halves(self) -> tuple[float, float]:
        """High level in each half of the time."""
        cut = (self.points[0][0] + self.points[-1][0]) / 2
        return _high([value for at_s, value in self.points if at_s < cut]), _high([value for at_s, value in self.points if at_s >= cut])

    def slope_per_hour(self) -> float:
        """Of a straight line through all points."""
        return statistics.linear_regression(*zip(*self.points, strict=True)).slope * 3600

    def allowed(self) -> float:
        """How far the second half may lie above the first."""
        return max(GROWTH_SHARE * self.halves()[0], GROWTH_BYTES if self.is_bytes else GROWTH_COUNT)

    def grew(self) -> bool:
        first, second = self.halves()
        return self.judged and second - first > self.allowed()


def _high(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def watch(job: Job, samples: list[Footprint], minutes: float, every_s: float, file: Path) -> None:
    """Fill ``samples``, from the first trained step on; each is written down at once."""
    job.until(lambda: last_step(job.folder) >= 1, START_S)
    began = time.monotonic()
    with file.open("w", newline="") as out:
        rows = csv.writer(out)
        rows.writerow(["at_s", "step", "what", "own_bytes", "shared_bytes", "threads", "files"])
        while time.monotonic() - began < minutes * 60 and job.process.poll() is None:
            sample = footprint(job, time.monotonic() - began)
            samples.append(sample)
            rows.writerow([f"{sample.at_s:.1f}", sample.step, "shared memory", 0, sample.shm_bytes, 0, sample.shm_files])
            rows.writerow([f"{sample.at_s:.1f}", sample.step, "run folder", sample.run_bytes, 0, 0, sample.run_files])
            rows.writerow([f"{sample.at_s:.1f}", sample.step, "ledger", 0, 0, 0, sample.ledger_files])
            rows.writerows([f"{sample.at_s:.1f}", sample.step, name, *_values(process)] for name, process in sample.processes.items())
            out.flush()
            time.sleep(max(0.0, began + len(samples) * every_s - time.monotonic()))


def _values(process) -> tuple[int, int, int, int]:
    return process.own_bytes, process.shared_bytes, process.threads, process.files


def after_warm_up(samples: list[Footprint]) -> list[Footprint]:
    """Too few to judge when the run was too slow to get there."""
    return [sample for sample in samples if sample.at_s >= samples[-1].at_s / 3 and sample.step * GROUPS >= REMEMBERED_GROUPS]


def series_of(samples: list[Footprint]) -> list[Series]:
    """Every quantity that was there all the time."""
    found = []
    for name in sorted({name for sample in samples for name in sample.processes}):
        judged = not name.startswith(RAY)
        for label, is_bytes, value in (
            ("own memory", True, lambda p: p.own_bytes),
            ("shared memory", True, lambda p: p.shared_bytes),
            ("threads", False, lambda p: p.threads),
            ("open files", False, lambda p: p.files),
        ):
            points = [(sample.at_s, float(value(sample.processes[name]))) for sample in samples if name in sample.processes]
            if len(points) >= 0.9 * len(samples):
                found.append(Series(f"{name}: {label}", points, is_bytes, judged))
    run: list[tuple[str, bool, bool, Callable[[Footprint], int]]] = [
        ("run: bytes in shared memory", True, True, lambda s: s.shm_bytes),
        ("run: files in shared memory", False, True, lambda s: s.shm_files),
        ("run: files in its folder, ledger aside", False, True, lambda s: s.run_files),
        ("run: files of the ledger", False, False, lambda s: s.ledger_files),  # they stay for the audit
        ("run: bytes in its folder", True, False, lambda s: s.run_bytes),
    ]
    found += [Series(name, [(s.at_s, float(value(s))) for s in samples], is_bytes, judged) for name, is_bytes, judged, value in run]
    return found


def table(found: list[Series]) -> list[str]:
    lines = [f"{'what':42s} {'first half':>13s} {'second half':>13s} {'change':>9s} {'allowed':>9s} {'an hour':>10s}  verdict"]
    for series in found:
        if series.name.startswith(RAY) and not series.name.endswith("own memory"):
            continue
        first, second = series.halves()
        unit, digits = (MIB, 1) if series.is_bytes else (1, 0)
        verdict = "not judged" if not series.judged else "GREW" if series.grew() else "flat"
        numbers = f"{first / unit:13.{digits}f} {second / unit:13.{digits}f} {(second - first) / unit:+9.{digits}f} {series.allowed() / unit:9.{digits}f}"
        lines.append(f"{series.name:42s} {numbers} {series.slope_per_hour() / unit:+10.1f}  {verdict}")
    return lines


def draw(found: list[Series], path: Path) -> None:
    """Own memory of each process and shared memory of the run, against time; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for series in found:
        if series.judged and series.is_bytes and (series.name.endswith("own memory") or series.name.startswith("run")):
            axes.plot([at_s / 60 for at_s, _ in series.points], [value / MIB for _, value in series.points], label=series.name, linewidth=1)
    axes.set(xlabel="minutes", ylabel="MiB", ylim=(0, None))
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=110)


def ends(job: Job, samples: list[Footprint]) -> list[str]:
    """What is wrong after the orderly end of the run."""
    if not samples:
        return ["the run trained no step"]
    wrong = []
    if job.process.returncode != 130:
        wrong.append(f"a run that was asked to end must end in order with code 130, got {job.process.returncode}: {job.output[-300:]}")
    if left := shared_memory_of(job.folder):
        wrong.append(f"shared memory stayed behind: {left}")
    books = audit(job.folder)
    if not books.closes:
        wrong.append(f"the ledger does not close: {books.differences}")
    if books.groups.in_flight:
        wrong.append(f"{books.groups.in_flight} groups are in flight after the end")
    if samples:
        say(f"{samples[-1].step} steps, {books.trajectories.generated} rows in {samples[-1].at_s / 60:.1f} minutes, {len(samples)} samples")
    return wrong


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every-s", type=float, default=5.0)
    parser.add_argument("--folder", type=Path, help="for soak.csv, soak.png and the run folder (default: a temporary one that is removed)")
    parser.add_argument("settings", nargs="*", help="more overrides of the configuration")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        root = arguments.folder or Path(made)
        root.mkdir(parents=True, exist_ok=True)
        with raised_signals():
            return soak(root, arguments.minutes, arguments.every_s, arguments.settings)


def soak(root: Path, minutes: float, every_s: float, settings: list[str]) -> int:
    job = Job(root / "run", f"--run-dir={root / 'run'}", *SETTINGS, *settings)
    samples: list[Footprint] = []
    try:
        watch(job, samples, minutes, every_s, root / "soak.csv")
    except Interrupted as signalled:
        say(f"{signalled}: the verdict is on the time so far")
    finally:
        job.stop()
    wrong, judged = ends(job, samples), after_warm_up(samples)
    clear(job.folder)
    if len(judged) < len(samples) / 4 or len(judged) < 8:
        wrong.append(f"a quarter of the samples comes after the warm-up, got {len(judged)} of {len(samples)}: the run was too short or too slow")
    else:
        found = series_of(judged)
        for line in table(found):
            say(line)
        wrong += [f"{series.name} grew" for series in found if series.grew()]
    if samples:
        draw(series_of(samples), root / "soak.png")
    for fault in wrong:
        say(f"error: {fault}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""The soak's own judgement; the half hour itself is ``make soak``."""

import random

import pytest

from tests.actors.footprint import footprint, last_step, lent_bytes
from tests.actors.jobs import Job, shared_memory_of
from tests.actors.soak import MIB, SETTINGS, Series


def series(value, *, is_bytes=True, judged=True, minutes=30) -> Series:
    noise = random.Random(1)
    return Series("x", [(at_s, value(at_s / 60) + noise.uniform(-1, 1) * (MIB if is_bytes else 1)) for at_s in range(0, minutes * 60, 5)], is_bytes, judged)


@pytest.mark.parametrize(
    ("value", "grew"),
    [
        (lambda minute: 100 * MIB, False),
        (lambda minute: 100 * MIB + MIB * minute, True),
        (lambda minute: 500 * MIB if minute > 20 or int(minute * 12) % 3 == 0 else 460 * MIB, False),  # an allocator that stops giving back
        (lambda minute: 900 * MIB + MIB * minute, False),  # fifteen MiB in fifteen minutes are below three percent of it
        (lambda minute: 900 * MIB + 4 * MIB * minute, True),
    ],
)
def test_growth_after_the_warm_up_is_found(value, grew):
    assert series(value).grew() is grew
    assert not series(value, judged=False).grew()


def test_counts_may_waver_and_not_climb():
    assert not series(lambda minute: 50, is_bytes=False).grew()
    assert series(lambda minute: 50 + minute, is_bytes=False).grew()


def test_the_slope_is_given_an_hour():
    assert series(lambda minute: 100 * MIB + 2 * MIB * minute).slope_per_hour() == pytest.approx(120 * MIB, rel=0.1)


@pytest.mark.ray
def test_a_run_goes_on_in_less_memory_than_its_rows_take(tmp_path):
    small = ("dataplane.capacity_bytes=2097152", "dataplane.segment_bytes=131072", "trainer.save_freq=15")
    job = Job(tmp_path / "run", f"--run-dir={tmp_path / 'run'}", *SETTINGS, *small)
    try:
        job.until(lambda: last_step(job.folder) >= 1)
        early = footprint(job, 0.0)
        job.until(lambda: lent_bytes(job.folder) > 4 * MIB, limit_s=120)
        late = footprint(job, 1.0)
        job.stop()
    finally:
        job.end()
    assert job.process.returncode == 130, job.output
    assert {"driver", "store", "replay", "prompt", "learner-0", "rollout-0", "trainer"} <= set(late.processes)
    assert late.shm_bytes <= 2 * MIB + 16 * MIB  # segments and a few weight snapshots
    assert late.run_files < early.run_files + 60  # samples and two checkpoints
    assert shared_memory_of(job.folder) == []

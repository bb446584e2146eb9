"""The benchmark of the store runs, measures every line, and cleans up; its numbers are for a quiet machine."""

from pathlib import Path

import pytest

from streamrl.dataplane.sweep import PREFIX
from tests.benchmarks import store_speed

pytestmark = pytest.mark.alone


def test_the_benchmark_measures_a_store_in_another_process_and_leaves_nothing():
    before = set(Path("/dev/shm").glob(f"{PREFIX}speed-*"))
    lines = store_speed.run(1, sizes=(1, 3), num_tags=1500)
    assert [line.name for line in lines] == ["list 1500 tags", "put 1", "get 1", "write back 1", "put 3", "get 3", "write back 3", "get 3"]
    assert all(ms > 0 for line in lines for ms in line.ms.values()) and lines[-1].share > 0
    assert set(Path("/dev/shm").glob(f"{PREFIX}speed-*")) == before

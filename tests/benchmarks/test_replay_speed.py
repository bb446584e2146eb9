"""The bars of the replay buffer's speed, with room for a busy machine."""

import pytest

from tests.benchmarks.replay_speed import pushes_per_s, take_ms

pytestmark = pytest.mark.alone


def test_pushes_are_taken_in_at_speed_with_the_journal_on(tmp_path):
    assert max(pushes_per_s(500, tmp_path / str(i)) for i in range(3)) > 10_000


def test_a_take_costs_the_same_with_a_hundred_times_the_resident_keys():
    few, _ = take_ms(100)
    many, bytes_a_key = take_ms(10_000)
    assert many < 5 * few + 0.5 and bytes_a_key < 3000

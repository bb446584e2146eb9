"""The bars of the protocol's speed, at twice their value and in the best of the repetitions: a test must pass on a busy machine."""

import pytest
import torch

from tests.benchmarks.protocol_speed import batch_speeds, line, memory, meta_speeds

pytestmark = pytest.mark.alone


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_jagged_batch_costs_what_its_bytes_cost(one_thread):
    with memory(kept=False):
        for speed in batch_speeds(repeats=7):
            assert speed.ratio(speed.against[0], of=min) < 2 * speed.bar, line(speed)


def test_a_meta_of_a_hundred_thousand_keys_moves_at_once():
    for speed in meta_speeds(repeats=5):
        assert min(speed.times_s["ours"]) < 2 * speed.bar, line(speed)

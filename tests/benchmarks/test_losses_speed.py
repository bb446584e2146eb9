"""The bar of the losses' speed, at twice its value, in the best of the repetitions and on a smaller batch: a test must pass on a busy machine."""

import pytest

from streamrl.config.losses import POLICY_LOSSES
from tests.benchmarks.losses_speed import BAR, calls, inputs
from tests.benchmarks.protocol_speed import interleaved

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def batch():
    return inputs(rows=256, tokens=1024)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_loss_with_its_metrics_costs_little_more_than_its_formula(name, batch):
    times = interleaved(calls(name, batch), repeats=7)
    assert min(times["ours"]) < 2 * BAR * min(times["bare"])

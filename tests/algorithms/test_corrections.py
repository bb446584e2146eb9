import math

import pytest
import torch

from streamrl.algorithms.corrections import parse_threshold, rollout_correction
from streamrl.algorithms.diagnostics import rollout_probs_diff
from streamrl.config.training import RolloutCorrection

LOG_RATIO = torch.tensor([[0.5, -0.2, 1.0]])
MASK = torch.ones(1, 3)


def correct(level, threshold=2.0, log_ratio=LOG_RATIO, mask=MASK):
    rollout = torch.full_like(log_ratio, -2.0)
    config = RolloutCorrection(rollout_is=level, rollout_is_threshold=threshold)
    return rollout_correction(rollout + log_ratio, rollout, mask, config)


@pytest.mark.parametrize(
    ("level", "threshold", "expected"),
    [
        ("token", 2.0, [1.648721, 0.818731, 2.0]),
        ("sequence", 2.0, [2.0, 2.0, 2.0]),
        ("sequence", 10.0, [3.669297] * 3),
        ("token", "0.5_2.0", [1.648721, 0.818731, 0.0]),
    ],
)
def test_weights_golden_a15(level, threshold, expected):
    weights, accept, metrics = correct(level, threshold)
    assert torch.allclose(weights, torch.tensor([expected]), atol=1e-5) and accept is None
    assert metrics["rollout_corr/is_max"] == pytest.approx(math.exp(1.0) if level == "token" else 3.669297, abs=1e-4)


def test_masked_tokens_have_weight_zero_even_when_their_log_probs_are_nan():
    weights, _, metrics = correct("sequence", 10.0, torch.tensor([[0.5, math.nan, 0.2]]), torch.tensor([[1, 0, 1]]))
    assert torch.allclose(weights, torch.tensor([[math.exp(0.7), 0, math.exp(0.7)]]))
    assert all(math.isfinite(value) for value in metrics.values())


def test_all_zero_weights_are_legal():
    weights, _, metrics = correct("token", "0.9_1.1")
    assert not weights.any() and metrics["rollout_corr/ess_ratio"] == 0.0 and metrics["rollout_corr/truncated_ratio"] == 1.0


def test_equal_policies_have_weight_one_and_no_mismatch():
    weights, _, metrics = correct("token", log_ratio=torch.zeros(2, 3), mask=torch.ones(2, 3))
    assert torch.equal(weights, torch.ones(2, 3))
    assert metrics["rollout_corr/kl"] == 0.0 and metrics["rollout_corr/ess_ratio"] == pytest.approx(1.0)


def test_off_gives_no_weights_but_metrics():
    weights, accept, metrics = correct(None)
    assert weights is None and accept is None and metrics["rollout_corr/kl"] == pytest.approx(-(0.5 - 0.2 + 1.0) / 3, abs=1e-6)


@pytest.mark.parametrize(
    ("value", "error"), [(True, TypeError), ([2.0], TypeError), ("", ValueError), ("a_b", ValueError), (0.0, ValueError), ("2_1", ValueError)]
)
def test_bad_thresholds_are_refused(value, error):
    with pytest.raises(error, match="rollout_is_threshold"):
        parse_threshold(value)


def test_bad_shapes_and_empty_batches_are_refused():
    with pytest.raises(ValueError, match="one shape"):
        rollout_correction(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 3))
    with pytest.raises(ValueError, match="at least one token"):
        rollout_correction(torch.zeros(1, 3), torch.zeros(1, 3), torch.zeros(1, 3))


def test_probability_difference_is_zero_not_nan_without_tokens():
    empty = rollout_probs_diff(torch.zeros(1, 3), torch.zeros(1, 3), torch.zeros(1, 3))
    assert set(empty.values()) == {0.0}
    same = rollout_probs_diff(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2))
    assert same["training/rollout_probs_diff_max"] == 0.0 and same["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)

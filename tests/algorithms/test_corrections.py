import math

import pytest
import torch

from streamrl.algorithms.corrections import rollout_correction
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
    assert metrics["rollout_corr/rejected_token_ratio"] == metrics["rollout_corr/rejected_seq_ratio"] == 1.0


def test_equal_policies_have_weight_one_and_no_mismatch():
    weights, _, metrics = correct("token", log_ratio=torch.zeros(2, 3), mask=torch.ones(2, 3))
    assert torch.equal(weights, torch.ones(2, 3))
    assert metrics["rollout_corr/kl"] == 0.0 and metrics["rollout_corr/ess_ratio"] == pytest.approx(1.0)


def test_off_gives_no_weights_but_metrics():
    weights, accept, metrics = correct(None)
    assert weights is None and accept is None and metrics["rollout_corr/kl"] == pytest.approx(-(0.5 - 0.2 + 1.0) / 3, abs=1e-6)


def test_bad_shapes_and_empty_batches_are_refused():
    with pytest.raises(ValueError, match="one shape"):
        rollout_correction(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 3))
    with pytest.raises(ValueError, match="at least one token"):
        rollout_correction(torch.zeros(1, 3), torch.zeros(1, 3), torch.zeros(1, 3))


@pytest.mark.parametrize("threshold", [2.0, "0.5_2.0"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_batch_normalization_makes_the_mean_weight_one(level, threshold):
    log_ratio = torch.tensor([[0.5, -0.2, 0.4], [-0.6, 0.3, math.nan], [math.nan] * 3])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]])
    rollout = torch.full_like(log_ratio, -2.0)
    plain, normed = (
        rollout_correction(
            rollout + log_ratio, rollout, mask, RolloutCorrection(rollout_is=level, rollout_is_threshold=threshold, rollout_is_batch_normalize=normalize)
        )[0]
        for normalize in (False, True)
    )
    mean = plain[mask == 1].mean() if level == "token" else (plain[0, 0] + plain[1, 0]) / 2
    assert torch.allclose(normed, plain / mean) and not normed[2].any()


def test_batch_normalization_of_zero_weights_is_skipped():
    config = RolloutCorrection(rollout_is_threshold="0.9_1.1", rollout_is_batch_normalize=True)
    weights, _, _ = rollout_correction(LOG_RATIO - 2, torch.full_like(LOG_RATIO, -2.0), MASK, config)
    assert weights.tolist() == [[0.0, 0.0, 0.0]]


def test_weights_carry_no_gradient_and_far_ratios_stay_finite():
    old = torch.tensor([[-1e4, 0.0], [0.0, 1e4]], requires_grad=True)
    for level in ("token", "sequence"):
        config = RolloutCorrection(rollout_is=level, rollout_rs="token_k1,seq_sum_k3", rollout_rs_threshold="2.0,1.0")
        weights, accept, metrics = rollout_correction(old, torch.zeros(2, 2), torch.ones(2, 2), config)
        assert not weights.requires_grad and torch.isfinite(weights).all() and not accept.any()
        assert all(math.isfinite(value) for value in metrics.values())


def test_metrics_by_lag_split_the_tokens():
    log_ratio, mask = torch.tensor([[0.1, 0.1], [1.0, 0.2], [0.3, 9.0], [-0.5, 2.0], [5.0, 5.0]]), torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1], [0, 0]])
    lags = torch.tensor([0, 1, 2, 7, 1])
    rollout = torch.full_like(log_ratio, -2.0)
    _, _, metrics = rollout_correction(rollout + log_ratio, rollout, mask, lags=lags)
    kl = {name: metrics[f"rollout_corr/kl/lag_{name}"] for name in ("0", "1", "2_3", "4_up")}
    assert kl == pytest.approx({"0": -0.1, "1": -0.6, "2_3": -0.3, "4_up": -0.75}, abs=1e-6)
    assert metrics["rollout_corr/truncated_ratio/lag_1"] == 0.5 and metrics["rollout_corr/truncated_ratio/lag_2_3"] == 0.0
    per_token = torch.tensor([[0, 0], [0, 1], [1, 9], [1, 1], [0, 0]])
    _, _, mixed = rollout_correction(rollout + log_ratio, rollout, mask, lags=per_token)
    assert mixed["rollout_corr/kl/lag_0"] == pytest.approx(-0.4, abs=1e-6) and "rollout_corr/kl/lag_4_up" not in mixed


def test_padding_rows_and_fillers_change_no_metric():
    _, _, metrics = correct("token", "0.5_2.0")
    for filler in (0.0, math.nan, math.inf):
        rows, mask = torch.full((3, 5), filler), torch.zeros(3, 5)
        rows[0, :3], mask[0, :3] = LOG_RATIO[0], 1
        assert correct("token", "0.5_2.0", rows, mask)[2] == pytest.approx(metrics)


def test_mismatch_metrics_of_a_known_batch():
    old, rollout = torch.tensor([[-1.0, -2.0], [-0.5, -0.5]]), torch.tensor([[-1.5, -1.5], [-1.0, -1.0]])
    _, _, metrics = rollout_correction(old, rollout, torch.ones(2, 2), RolloutCorrection(rollout_is=None))
    ratios = [math.exp(x) for x in (0.5, -0.5, 0.5, 0.5)]
    expected = {
        "training_ppl": (math.exp(1.5) + math.exp(0.5)) / 2,
        "rollout_ppl": (math.exp(1.5) + math.exp(1.0)) / 2,
        "log_ppl_diff": -0.25,
        "log_ppl_abs_diff": 0.25,
        "log_ppl_diff_max": 0.0,
        "log_ppl_diff_min": -0.5,
        "ppl_ratio": (1 + math.exp(-0.5)) / 2,
        "kl": -0.25,
        "k3_kl": sum(ratios) / 4 - 1.25,
        "chi2_token": sum(r * r for r in ratios) / 4 - 1,
        "chi2_seq": (1 + math.exp(2)) / 2 - 1,
        "rejected_token_ratio": 0.0,
        "rejected_seq_ratio": 0.0,
    }
    assert metrics == pytest.approx({f"rollout_corr/{name}": value for name, value in expected.items()}, rel=1e-5, abs=1e-6)

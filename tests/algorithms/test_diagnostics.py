import math

import numpy as np
import pytest
import torch

from streamrl.algorithms import diagnostics
from streamrl.algorithms.diagnostics import (
    effective_sample_size,
    entropy_diagnostics,
    log_prob_gap,
    policy_diagnostics,
    rejected_share,
    rollout_probs_diff,
    zero_variance_share,
)

MASK = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]])


def batch(*kept):
    """The three kept tokens of MASK; NaN elsewhere."""
    values = torch.full((3, 3), math.nan)
    values[MASK.bool()] = torch.tensor(kept)
    return values


def test_the_worst_row_skips_masked_rows_and_nan():
    found = log_prob_gap(batch(0.03, 0.01, 0.5), batch(0.0, 0.0, math.nan), MASK)
    assert found["gap_row_max"] == pytest.approx(0.02) and found["gap_row_worst"] == 0.0 and found["gap_mean"] == pytest.approx(0.02)
    assert found["gap_max"] == pytest.approx(0.03) and found["gap_p99"] == pytest.approx(0.0298)


def test_policy_diagnostics_of_three_tokens():
    found = policy_diagnostics(batch(-1.0, -1.0, -1.0), batch(-1 + math.log(1.5), -1 + math.log(0.5), -1.0), batch(1.0, -1.0, 1.0), MASK, low=0.2, high=0.2)
    assert found["ratio_p50"] == pytest.approx(1.0) and found["ratio_max"] == pytest.approx(1.5)
    assert found["clip_high"] == found["clip_low"] == pytest.approx(1 / 3)
    l1, l2 = math.log(1.5), math.log(0.5)
    assert found["kl_k1"] == pytest.approx(-(l1 + l2) / 3) and found["kl_k2"] == pytest.approx((l1**2 + l2**2) / 6)
    assert found["kl_k3"] == pytest.approx((0.5 - l1 - 0.5 - l2) / 3)


@pytest.mark.parametrize(("weights", "share"), [((1.0, 1.0, 1.0), 1.0), ((5.0, 0.0, 0.0), 1 / 3), ((0.0, 0.0, 0.0), 0.0), ((2.0, 1.0, 0.0), 9 / 15)])
def test_effective_sample_size(weights, share):
    assert effective_sample_size(batch(*weights), MASK) == pytest.approx(share)


def test_entropy_and_rejection():
    assert entropy_diagnostics(batch(0.0, 1.0, 2.0), MASK) == pytest.approx({"entropy_mean": 1.0, "entropy_p10": 0.2, "entropy_near_zero": 1 / 3})
    assert rejected_share(MASK, MASK * torch.tensor([1, 0, 0])) == pytest.approx(1 / 3) and rejected_share(MASK * 0, MASK * 0) == 0.0


def test_zero_variance_counts_groups_that_can_be_compared():
    scores, groups = [1.0, 1.0, 0.0, 1.0, 5.0, math.nan, 2.0, 2.0], list("AABBCCDD")
    assert zero_variance_share(scores, groups) == pytest.approx(2 / 3)  # A and D of A, B, D; C has one finite score
    assert zero_variance_share([], []) == zero_variance_share(np.array([1.0]), ["A"]) == 0.0


@pytest.mark.parametrize("shape", [(2, 3), (0, 0), (2, 0), (0, 3)])
@pytest.mark.parametrize("filler", [math.nan, math.inf, 0.0])
def test_an_empty_batch_gives_zeros(shape, filler):
    values, mask = torch.full(shape, filler), torch.zeros(shape)
    everything = [*policy_diagnostics(values, values, values, mask, low=0.2, high=0.2).values(), *entropy_diagnostics(values, mask).values()]
    everything += [effective_sample_size(values, mask), rejected_share(mask, mask), *rollout_probs_diff(values, values, mask).values()]
    assert set(everything) == {0.0}
    assert log_prob_gap(values, values, mask) == {"gap_mean": 0.0, "gap_p99": 0.0, "gap_max": 0.0, "gap_row_max": 0.0, "gap_row_worst": -1.0}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e4, -1e4])
def test_no_value_of_a_token_makes_a_number_that_is_not_finite(value):
    odd, plain, mask = torch.full((2, 2), value), torch.zeros(2, 2), torch.ones(2, 2)
    for found in (policy_diagnostics(odd, plain, plain, mask, low=0.2, high=0.2), policy_diagnostics(plain, odd, odd, mask, low=0.2, high=0.2)):
        assert all(math.isfinite(number) for number in found.values())
    for found in (log_prob_gap(odd, plain, mask), entropy_diagnostics(odd, mask), {"ess": effective_sample_size(odd, mask)}):
        assert all(math.isfinite(number) for number in found.values())


def test_probability_difference_is_zero_not_nan_without_tokens():
    empty = rollout_probs_diff(torch.zeros(1, 3), torch.zeros(1, 3), torch.zeros(1, 3))
    assert set(empty.values()) == {0.0}
    same = rollout_probs_diff(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2))
    assert same["training/rollout_probs_diff_max"] == 0.0 and same["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)


def test_nothing_here_keeps_a_graph():
    grown = torch.zeros(1, 2, requires_grad=True)
    assert policy_diagnostics(grown, grown, grown, torch.ones(1, 2), low=0.2, high=0.2)["ratio_max"] == 1.0
    assert diagnostics.effective_sample_size(grown + 1, torch.ones(1, 2)) == 1.0

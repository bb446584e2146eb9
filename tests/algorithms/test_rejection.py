import itertools
import math

import pytest
import torch

from streamrl.algorithms.corrections import rollout_correction
from streamrl.config.corrections import REJECTION_RULES
from streamrl.config.training import RolloutCorrection

LOG_RATIO = torch.tensor([[0.0, 0.0, 1.2], [0.1, -0.2, 0.0], [-1.0, -1.0, 5.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]])


def accepted(rules, threshold, log_ratio=LOG_RATIO, mask=MASK):
    rollout = torch.full_like(log_ratio, -3.0)
    return rollout_correction(rollout + log_ratio, rollout, mask, RolloutCorrection(rollout_rs=rules, rollout_rs_threshold=threshold))[1:]


@pytest.mark.parametrize(
    ("rules", "threshold", "kept"),
    [
        ("token_k1", 2.0, [[1, 1, 0], [1, 1, 1], [0, 0, 1]]),
        ("token_k1", "0.3_3.0", [[1, 1, 1], [1, 1, 1], [1, 1, 1]]),
        ("token_k1", "0.5_1.0", [[1, 1, 0], [1, 0, 1], [0, 0, 1]]),  # -lr in [-0.69, 0]: the engine may only be less sure
        ("token_k2", 0.6, [[1, 1, 0], [1, 1, 1], [1, 1, 1]]),
        ("token_k3", 0.4, [[1, 1, 0], [1, 1, 1], [1, 1, 1]]),
        ("seq_sum_k1", 2.0, [[0, 0, 0], [1, 1, 1], [0, 0, 0]]),
        ("seq_mean_k1", 2.0, [[1, 1, 1], [1, 1, 1], [0, 0, 0]]),
        ("seq_sum_k2", 0.8, [[1, 1, 1], [1, 1, 1], [0, 0, 0]]),
        ("seq_mean_k2", 0.3, [[1, 1, 1], [1, 1, 1], [0, 0, 0]]),
        ("seq_max_k2", 0.6, [[0, 0, 0], [1, 1, 1], [1, 1, 1]]),
        ("seq_sum_k3", 0.73, [[0, 0, 0], [1, 1, 1], [0, 0, 0]]),
        ("seq_mean_k3", 0.37, [[0, 0, 0], [1, 1, 1], [1, 1, 1]]),
        ("seq_max_k3", 1.0, [[0, 0, 0], [1, 1, 1], [1, 1, 1]]),
        ("token_k1,seq_max_k3", "2.0,1.0", [[0, 0, 0], [1, 1, 1], [0, 0, 1]]),
        ("seq_mean_k2 , seq_max_k2", 0.6, [[0, 0, 0], [1, 1, 1], [1, 1, 1]]),
    ],
)
def test_each_rule_rejects_what_is_too_far(rules, threshold, kept):
    accept, metrics = accepted(rules, threshold)
    assert accept.dtype == torch.bool and accept.long().tolist() == kept
    left = torch.tensor(kept).bool() & MASK.bool()
    assert metrics["rollout_corr/rejected_token_ratio"] == pytest.approx(1 - left.sum().item() / 8)
    assert metrics["rollout_corr/rejected_seq_ratio"] == pytest.approx(1 - left.any(1).float().mean().item())


def test_rules_are_combined_by_and():
    alone = {rule: accepted(rule, 1.5)[0] for rule in REJECTION_RULES}
    for one, other in itertools.combinations(REJECTION_RULES, 2):
        assert torch.equal(accepted(f"{one},{other}", 1.5)[0], alone[one] & alone[other])


@pytest.mark.parametrize("rule", REJECTION_RULES)
def test_equal_policies_are_accepted_and_far_ones_rejected(rule):
    assert accepted(rule, 1.5, torch.zeros(2, 3), torch.ones(2, 3))[0].all()
    for far in (30.0, -30.0, 1e4, -1e4):
        assert not accepted(rule, 1.5, torch.full((2, 3), far), torch.ones(2, 3))[0].any()


@pytest.mark.parametrize("rule", REJECTION_RULES)
@pytest.mark.parametrize("filler", [0.0, 50.0, math.nan, math.inf, -math.inf])
def test_masked_slots_and_masked_rows_decide_nothing(rule, filler):
    wide, mask = torch.full((4, 5), filler), torch.zeros(4, 5, dtype=torch.long)
    wide[:3, :3] = torch.where(MASK.bool(), LOG_RATIO, filler)
    mask[:3, :3] = MASK
    accept, metrics = accepted(rule, 1.5, wide, mask)
    plain, plain_metrics = accepted(rule, 1.5)
    assert torch.equal(accept[:3, :3] & MASK.bool(), plain & MASK.bool()) and accept[3].all() and metrics == pytest.approx(plain_metrics)


def test_outlier_sequences_are_masked_and_counted():
    log_ratio, mask = torch.tensor([[0.01] * 4, [-0.01] * 4, [3.0] * 4, [-3.0] * 4]), torch.ones(4, 4)
    accept, metrics = accepted("seq_mean_k2", 0.5, log_ratio, mask)  # |lr| of 1 has k2 0.5
    assert accept.any(1).tolist() == [True, True, False, False] and metrics["rollout_corr/rejected_seq_ratio"] == 0.5
    accept, metrics = accepted("seq_mean_k2", 0.5, torch.full((4, 4), 3.0), mask)
    assert not accept.any() and metrics["rollout_corr/rejected_token_ratio"] == 1.0


def test_rejection_leaves_the_weights_alone():
    rollout = torch.full_like(LOG_RATIO, -3.0)
    plain = rollout_correction(rollout + LOG_RATIO, rollout, MASK)[0]
    assert torch.equal(plain, rollout_correction(rollout + LOG_RATIO, rollout, MASK, RolloutCorrection(rollout_rs="token_k1", rollout_rs_threshold=1.1))[0])

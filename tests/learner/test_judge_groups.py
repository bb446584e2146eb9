"""A group that is dropped for its size changes nothing of the groups that are trained."""

import math

import pytest
import torch

from streamrl.algorithms.kl_control import AdaptiveKL
from streamrl.config.estimators import ESTIMATORS
from streamrl.config.training import AlgorithmConfig, RolloutCorrection
from streamrl.learner.judge import judge

KEYS = ["a_0_0", "a_1_0", "b_0_0", "b_1_0"]
COMPARED = sorted(set(ESTIMATORS) - {"gae"})


def judged(num_rows: int, config: AlgorithmConfig, controller: AdaptiveKL | None = None):
    """The first rows of: A scores 1, 0; B scores 100 and nothing finite."""
    mask = torch.ones(num_rows, 2, dtype=torch.long)
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 100.0], [0.0, math.nan]])[:num_rows]
    old = torch.tensor([[-1.0, -0.5], [-0.3, -2.0], [-0.1, -4.0], [-1.0, -1.0]])[:num_rows]
    scores = rewards.sum(1)
    columns = {
        "ref_log_prob": old - 0.5 * torch.arange(1.0, num_rows + 1)[:, None],
        "sum_pi_squared": torch.full((num_rows, 2), 0.3),
        "reward_baselines": torch.zeros(num_rows),
        "reward_extra_info": [{"k": float(score)} for score in scores],
    }
    return judge(KEYS[:num_rows], mask, rewards, old, old + 0.01, config, columns=columns, controller=controller)


@pytest.mark.parametrize("estimator", COMPARED)
def test_a_dropped_group_does_not_change_the_advantages_of_trained_ones(estimator):
    config = AlgorithmConfig(adv_estimator=estimator, gdpo_reward_keys=("k",) if estimator == "gdpo" else None, min_group_size=2)
    alone, both = judged(2, config), judged(4, config)
    assert torch.equal(both.advantages[:2], alone.advantages) and alone.advantages.any()
    assert torch.equal(both.returns[:2], alone.returns)
    assert not both.loss_mask[2:].any() and ("b_0_0", "group_too_small") in both.report.rejected


@pytest.mark.parametrize("estimator", ["gpg", "grpo"])
def test_nor_when_the_statistics_are_over_all_samples(estimator):
    correction = RolloutCorrection(rollout_rs="token_k1", rollout_rs_threshold=2.0)
    config = AlgorithmConfig(adv_estimator=estimator, group_stats="all", min_group_size=2, rollout_correction=correction)
    assert torch.equal(judged(4, config).advantages[:2], judged(2, config).advantages)


def test_a_dropped_group_does_not_steer_the_kl():
    moved = []
    for num_rows in (2, 4):
        controller = AdaptiveKL(0.1, target=0.7, horizon=10)
        judged(num_rows, AlgorithmConfig(use_kl_in_reward=True, min_group_size=2), controller)
        moved.append(controller.beta)
    assert moved[0] == moved[1] != 0.1

"""What each estimator computes: published numbers, closed forms, and plain loops that follow the formula token by token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from streamrl.algorithms import advantages
from streamrl.config.training import AlgorithmConfig
from tests.algorithms.answers import GROUP, WHITENED, batch_of, config_of, estimate

PLAIN = {"norm_adv_by_std_in_grpo": False}


def scalars(name: str, scores: list[float], lengths: list[int] | None = None, uids: list[str] | None = None, **changes: Any) -> list[float]:
    """The advantage of each sample, read from its first token."""
    lengths = lengths or [1] * len(scores)
    got, returns = estimate(name, batch_of([[1] * n for n in lengths], scores, uids or ["A"] * len(scores)), **changes)
    assert torch.equal(got, returns) or name in ("gae", "reinforce_plus_plus", "remax") or "baseline" in name
    return got[:, 0].tolist()


def whitened(values: list[float]) -> list[float]:
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return [(value - mean) / math.sqrt(variance + 1e-8) for value in values]


def test_rloo_golden_a3():
    for name in ("rloo", "rloo_vectorized"):
        assert scalars(name, [1, 0, 0.5]) == pytest.approx([0.75, -0.75, 0])


def test_opo_golden_a4():
    assert scalars("opo", [1, 0, 0.5], [3, 5, 2]) == pytest.approx([0.6, -0.4, 0.1])


def test_gae_golden_a7():
    rewards, values, mask = torch.tensor([[0.0, 0, 1]]), torch.tensor([[0.5, 9, 0.2]]), torch.tensor([[1, 0, 1]])
    got, returns = advantages.get("gae")(rewards, mask, config=AlgorithmConfig(adv_estimator="gae", lam=0.95), values=values)
    assert torch.allclose(got, torch.tensor([[-0.707107, 0, 0.707107]]), atol=1e-5)
    assert torch.allclose(returns, torch.tensor([[0.96, 0, 1.0]]), atol=1e-6) and got[0, 1] == returns[0, 1] == 0


def test_reinforce_plus_plus_golden_a8():
    rewards, mask = torch.tensor([[0.0, 0, 1]]), torch.tensor([[1, 0, 1]])
    _, returns = advantages.get("reinforce_plus_plus")(rewards, mask, config=AlgorithmConfig(gamma=0.9))
    assert torch.allclose(returns, torch.tensor([[0.9, 0, 1.0]]))


def test_reward_to_go_passes_through_observations():
    rewards, mask = torch.tensor([[0.0, 0, 0, 0, 2]]), torch.tensor([[1, 1, 0, 0, 1]])
    _, returns = advantages.get("reinforce_plus_plus")(rewards, mask, config=AlgorithmConfig(gamma=0.5))
    assert returns.tolist() == [[0.5, 1, 0, 0, 2]]


def test_the_worked_example_of_two_prompts():
    lengths, scores, uids = [3, 5, 4, 2, 4, 6], [1, 0, 0.5, 0, 0, 1], ["A"] * 3 + ["B"] * 3
    for name in ("grpo", "grpo_vectorized"):
        assert scalars(name, scores, lengths, uids) == pytest.approx([0.999998, -0.999998, 0, -0.577349, -0.577349, 1.154699], abs=1e-5)
        assert scalars(name, scores, lengths, uids, **PLAIN) == pytest.approx([0.5, -0.5, 0, -1 / 3, -1 / 3, 2 / 3])


def test_groups_of_unequal_size_each_have_their_own_mean():
    scores, uids = [2, 20, 1, 4, 1, 6, 30, 8, 1], list("ABCACABAC")
    assert scalars("grpo", scores, uids=uids, **PLAIN) == pytest.approx([-3, -5, 0, -1, 0, 1, 5, 3, 0])


def test_passk_credits_the_best_with_its_lead():
    assert scalars("grpo_passk", [1, 0, 0.5]) == pytest.approx([0.5 / 0.500001, 0, 0])
    assert scalars("grpo_passk", [0.25, 3, 1, 1.5], uids=list("ABAB"), **PLAIN) == [0, 1.5, 0.75, 0]
    assert scalars("grpo_passk", [1, 1, 0]) == [0, 0, 0]


def test_passk_needs_two_samples_but_bears_a_rejected_one():
    with pytest.raises(ValueError, match=r"at least two samples of a prompt, got one of \['A'\]"):
        scalars("grpo_passk", [1])
    assert scalars("grpo_passk", [1, math.nan]) == [0, 0]


def test_gdpo_normalises_each_component_before_it_adds():
    keys = {"gdpo_reward_keys": ("x", "y")}
    batch = batch_of([[1]] * 4, [0] * 4, list("AABB")) | {"x": np.array([1, 0, 0, 3.0]), "y": np.array([0, 100, 5, 5.0])}
    x, y = 0.5 / (math.sqrt(0.5) + 1e-6), 50 / (math.sqrt(5000) + 1e-6)
    equal = whitened([x - y, -x + y, -x, x])
    assert estimate("gdpo", batch, **keys)[0][:, 0].tolist() == pytest.approx(equal, abs=1e-5)
    weighted = whitened([2 * x - 0.5 * y, -2 * x + 0.5 * y, -2 * x, 2 * x])
    got = estimate("gdpo", batch, **keys, gdpo_reward_weights=(2.0, 0.5))[0]
    assert got[:, 0].tolist() == pytest.approx(weighted, abs=1e-5)


def test_gdpo_takes_components_from_what_the_score_function_returned():
    batch = batch_of([[1]] * 2, [0, 1], ["A", "A"])
    columns = {name: column for name, column in batch.items() if name not in ("correct", "short")}
    extra = [{"correct": 1.0, "short": 2}, {"correct": 0.0, "short": 5}]
    expected = estimate("gdpo", columns | {"correct": np.array([1.0, 0]), "short": np.array([2.0, 5])})[0]
    assert torch.equal(estimate("gdpo", columns | {"reward_extra_info": extra})[0], expected)
    with pytest.raises(ValueError, match=r"component 'short' of every row, got components \['correct'\]"):
        estimate("gdpo", columns | {"reward_extra_info": [{"correct": 1.0}, {"correct": 0.0}]})
    with pytest.raises(ValueError, match="gdpo_reward_keys, got none"):
        advantages.get("gdpo")(batch["token_level_rewards"], batch["response_mask"], index=["A", "A"])


def test_gdpo_rejects_a_sample_with_a_broken_component():
    batch = batch_of([[1, 1]] * 3, [1, 0, 1], ["A"] * 3)
    without = estimate("gdpo", {name: column[:2] for name, column in batch.items()})[0]
    batch["short"][2] = math.nan
    got = estimate("gdpo", batch)[0]
    assert torch.equal(got[:2], without) and not got[2].any()


def test_gpg_scales_by_the_share_of_samples_that_earned_something():
    assert scalars("gpg", [1, 0, 0.5]) == pytest.approx([0.75, -0.75, 0])
    assert scalars("gpg", [1, 0, 0, 0], uids=list("AABB"), f_norm=2.0) == pytest.approx([1, -1, 0, 0])
    assert scalars("gpg", [0, 0]) == [0, 0]


def test_reinforce_plus_plus_baseline_whitens_what_is_over_the_mean():
    expected = whitened([0.5, -0.5, -0.5, 1.5, -1.5])  # the second sample has two tokens
    got = scalars("reinforce_plus_plus_baseline", [1, 0, 3, 0], [1, 2, 1, 1], list("AABB"))
    assert got == pytest.approx([expected[0], expected[1], expected[3], expected[4]], abs=1e-5)


def test_remax_is_the_reward_to_go_over_the_greedy_score():
    rewards, mask = torch.tensor([[0.5, 7, 1], [0, 0, 2]]), torch.tensor([[1, 0, 1], [1, 1, 1]])
    got, returns = advantages.get("remax")(rewards, mask, reward_baselines=torch.tensor([0.25, 1]))
    assert returns.tolist() == [[1.5, 0, 1], [2, 2, 2]] and got.tolist() == [[1.25, 0, 0.75], [1, 1, 1]]
    with pytest.raises(ValueError, match=r"greedy score .* got none"):
        advantages.get("remax")(rewards, mask)


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_token_baselines_weigh_scores_by_gathered_gradient(name):
    batch = batch_of([[1], [1]], [1, 0], ["A", "A"])
    batch |= {"old_log_probs": torch.full((2, 1), math.log(0.5)), "sum_pi_squared": torch.tensor([[1.0], [3.0]]), "rollout_is_weights": None}
    assert estimate(name, batch)[0].flatten().tolist() == pytest.approx([0.75, -0.25])
    batch["rollout_is_weights"] = torch.tensor([[math.sqrt(3)], [1.0]])
    assert estimate(name, batch)[0].flatten().tolist() == pytest.approx([0.5, -0.5])


def test_a_group_of_one_is_what_the_table_says():
    score, norm = 0.75, 0.75 / (1 + 1e-6)
    for name, expected in {"grpo": norm, "grpo_vectorized": norm, "rloo": score, "rloo_vectorized": 0.0, "opo": score, "gpg": score}.items():
        assert scalars(name, [score]) == [pytest.approx(expected)], name
    assert scalars("grpo", [score], **PLAIN) == [score]
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        assert scalars(name, [score], [3]) == [score]
    # whitened: a group of one keeps S before, as two of them show
    assert scalars("reinforce_plus_plus_baseline", [3, 1], uids=["A", "B"]) == pytest.approx(whitened([3, 1]))
    assert scalars("gdpo", [3, 1], uids=["A", "B"], gdpo_reward_keys=("correct",)) == pytest.approx(whitened([3 / (1 + 1e-6), 1 / (1 + 1e-6)]))


@pytest.mark.parametrize("name", [name for name in GROUP if "token_baseline" not in name])
@pytest.mark.parametrize(("score", "size"), [(1.0, 4), (0.1, 8), (0.7, 7), (1 / 3, 64)])
def test_equal_scores_of_a_group_give_exactly_zero(name, score, size):
    got = scalars(name, [score] * size + [0.0] * 2, uids=["A"] * size + ["B"] * 2, gdpo_reward_keys=("correct",) if name == "gdpo" else None)
    assert not any(got)


@pytest.mark.parametrize("name", GROUP)
def test_equal_scores_of_a_group_give_nothing_of_size(name):
    got, _ = estimate(name, batch_of([[1, 1]] * 8, [0.1] * 8, ["A"] * 8), gdpo_reward_keys=("correct",) if name == "gdpo" else None)
    assert got.abs().max() < 1e-4


# plain loops: the formula, row by row, on the shapes a batch really has


def loop_gae(batch: dict[str, Any], gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    rewards, values, mask = (batch[name] for name in ("token_level_rewards", "values", "response_mask"))
    raw, returns = torch.zeros(mask.shape), torch.zeros(mask.shape)
    for row in range(len(mask)):
        next_value = next_advantage = 0.0
        for t in reversed(range(mask.shape[1])):
            if mask[row, t]:
                delta = rewards[row, t] + gamma * next_value - values[row, t]
                next_advantage = delta + gamma * lam * next_advantage
                next_value = values[row, t]
                raw[row, t], returns[row, t] = next_advantage, next_advantage + next_value
    return spread_like(whitened(raw[mask.bool()].tolist()), mask), returns


def loop_reinforce_plus_plus(batch: dict[str, Any], gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    rewards, mask = batch["token_level_rewards"], batch["response_mask"]
    returns = torch.zeros(mask.shape)
    for row in range(len(mask)):
        carry = 0.0
        for t in reversed(range(mask.shape[1])):
            if mask[row, t]:
                carry = rewards[row, t] + gamma * carry
                returns[row, t] = carry
    return spread_like(whitened(returns[mask.bool()].tolist()), mask), returns


def loop_token_baseline(batch: dict[str, Any], compact: bool) -> tuple[Tensor, Tensor]:
    """Positions are columns, or with ``compact`` the number of model tokens before."""
    mask, uids = batch["response_mask"], batch["index"]
    gone, gathered = torch.zeros(mask.shape), torch.zeros(mask.shape)
    for row in range(len(mask)):
        energy = 0.0
        for t in range(mask.shape[1]):
            gone[row, t] = (batch["token_level_rewards"][row, t:] * mask[row, t:]).sum() * mask[row, t]
            w = 1 - 2 * batch["old_log_probs"][row, t].exp() + batch["sum_pi_squared"][row, t]
            energy += float(w * batch["rollout_is_weights"][row, t] ** 2) * int(mask[row, t])
            gathered[row, t] = energy
    place = mask.cumsum(1) - 1 if compact else torch.arange(mask.shape[1]).expand(mask.shape)
    lengths = mask.sum(1).tolist()
    result = torch.zeros(mask.shape)
    for row, t in torch.nonzero(mask).tolist():
        mates = [mate for mate in range(len(mask)) if uids[mate] == uids[row]]
        others = [lengths[mate] for mate in mates if mate != row]
        top = earned = 0.0
        for mate in mates:
            for u in range(mask.shape[1]):
                if mask[mate, u] and place[mate, u] == place[row, t]:
                    top, earned = top + float(gathered[mate, u]), earned + float(gone[mate, u] * gathered[mate, u])
        alone = not others or (lengths[row] > max(others) and place[row, t] >= max(others))
        result[row, t] = gone[row, t] - (0.0 if alone else earned / (top + 1e-8))
    return result, gone


def spread_like(values: list[float], mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_scatter_(mask.bool(), torch.tensor(values))


LOOPS = {
    "gae": lambda batch: loop_gae(batch, 0.9, 0.8),
    "reinforce_plus_plus": lambda batch: loop_reinforce_plus_plus(batch, 0.9, 0.8),
    "optimal_token_baseline": lambda batch: loop_token_baseline(batch, compact=False),
    "tir_optimal_token_baseline": lambda batch: loop_token_baseline(batch, compact=True),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("seed", range(5))
def test_token_estimators_follow_their_recursion(name, seed):
    dice = np.random.default_rng(seed)
    masks = [dice.integers(0, 2, size=dice.integers(1, 9)).tolist() for _ in range(7)]
    batch = batch_of(masks, dice.normal(size=7).tolist(), dice.choice(["A", "B", "C"], size=7).tolist(), seed)
    batch["token_level_rewards"] = torch.tensor(dice.normal(size=batch["response_mask"].shape), dtype=torch.float32) * batch["response_mask"]
    for got, expected in zip(estimate(name, batch), LOOPS[name](batch), strict=True):
        assert torch.allclose(got, expected, atol=1e-5)


def test_whitened_estimators_have_mean_zero_and_unit_variance_over_the_tokens():
    batch = batch_of([[1, 1, 0, 1], [1, 1], [1], [0, 1, 1]], [1, 0, 0.5, 2], ["A", "A", "B", "B"])
    for name in WHITENED:
        changes = {"gdpo_reward_weights": (1.0, 0.5)} if name == "gdpo" else {}
        kept = estimate(name, batch, **changes)[0][batch["response_mask"].bool()].double()
        assert kept.mean().abs() < 1e-6 and kept.var() == pytest.approx(1, abs=1e-5), name


def test_defaults_act_without_a_configuration():
    batch = batch_of([[1, 0, 1], [1, 1, 1]], [1, 0.5], ["A", "A"])
    for name in ("gae", "grpo", "remax", "reinforce_plus_plus", "gpg"):
        plain = advantages.get(name)(**batch)
        assert all(map(torch.equal, plain, advantages.get(name)(**batch, config=config_of(name, gamma=1.0, lam=1.0)))), name

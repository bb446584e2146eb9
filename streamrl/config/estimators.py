"""What each advantage estimator reads: the table by which a configuration refuses an option without effect, or a column that nothing makes.

Knows names, not formulas. Every estimator reads token_level_rewards and response_mask; what it needs beyond them stands here. Estimators of
user code (``module.path:name``) are unknown: nothing is refused for them.
"""

from __future__ import annotations

from dataclasses import dataclass

TOKEN = frozenset({"multi_output"})
GROUP = frozenset({"group_stats"})
DISCOUNT = frozenset({"gamma"})
NORM = frozenset({"norm_adv_by_std_in_grpo"})


@dataclass(frozen=True)
class EstimatorTraits:
    """One estimator. ``group``: it compares the samples of a prompt. ``needs``: columns without which it cannot run; ``options``: keys of
    ``algorithm`` that act."""

    group: bool
    needs: tuple[str, ...] = ()
    options: frozenset[str] = frozenset()


ESTIMATORS: dict[str, EstimatorTraits] = {
    "gae": EstimatorTraits(False, ("values",), TOKEN | DISCOUNT | {"lam"}),
    "grpo": EstimatorTraits(True, (), GROUP | NORM),
    "grpo_vectorized": EstimatorTraits(True, (), GROUP | NORM),
    "grpo_passk": EstimatorTraits(True, (), GROUP | NORM),
    "gdpo": EstimatorTraits(True, ("reward_extra_info",), GROUP | NORM | {"gdpo_reward_keys", "gdpo_reward_weights"}),
    "rloo": EstimatorTraits(True, (), GROUP),
    "rloo_vectorized": EstimatorTraits(True, (), GROUP),
    "reinforce_plus_plus": EstimatorTraits(False, (), TOKEN | DISCOUNT),
    "reinforce_plus_plus_baseline": EstimatorTraits(True, (), GROUP),
    "remax": EstimatorTraits(False, ("reward_baselines",), TOKEN),
    "opo": EstimatorTraits(True, (), GROUP),
    "gpg": EstimatorTraits(True, (), GROUP | {"f_norm"}),
    "optimal_token_baseline": EstimatorTraits(True, ("old_log_probs", "sum_pi_squared"), GROUP),
    "tir_optimal_token_baseline": EstimatorTraits(True, ("old_log_probs", "sum_pi_squared"), GROUP),
}


# What a sample without siblings gets instead of its raw reward.
ALONE = {
    "gdpo": "it is compared with the whole batch",
    "reinforce_plus_plus_baseline": "it is compared with the whole batch",
    "gpg": "its advantage is its raw reward, scaled by the share of the batch that earned anything",
    "optimal_token_baseline": "its advantage is its reward to go",
    "tir_optimal_token_baseline": "its advantage is its reward to go",
}


def is_group_estimator(name: str) -> bool:
    """Whether a sample is compared with its siblings; an estimator of user code may do so and counts as one that does not.

    >>> is_group_estimator("rloo"), is_group_estimator("gae")
    (True, False)
    """
    return name in ESTIMATORS and ESTIMATORS[name].group


def idle_options(name: str, changed: set[str]) -> list[str]:
    """Those of the ``changed`` keys of ``algorithm`` that this estimator never reads; empty for user code.

    >>> idle_options("grpo", {"gamma", "min_group_size"})
    ['gamma']
    """
    if name not in ESTIMATORS:
        return []
    every = frozenset[str]().union(*(traits.options for traits in ESTIMATORS.values()))
    return sorted((changed & every) - ESTIMATORS[name].options)


def check_estimator(name: str) -> None:
    """A known name, or ``module.path:name`` of user code."""
    if name not in ESTIMATORS and ":" not in name:
        raise ValueError(f"adv_estimator must be one of {sorted(ESTIMATORS)} or 'module.path:name', got {name!r}; correct algorithm.adv_estimator")


def check_gdpo(name: str, keys: tuple[str, ...] | None, weights: tuple[float, ...] | None) -> None:
    """gdpo has keys, without doubles, and a weight for each of them when there are weights, not all of them 0."""
    if name == "gdpo" and not keys:
        raise ValueError("adv_estimator=gdpo needs gdpo_reward_keys, got none; name the reward components that the score function returns")
    if keys is not None and (not keys or len(set(keys)) != len(keys)):
        raise ValueError(f"gdpo_reward_keys must name each reward component once, got {list(keys)}; correct the list or set it to null")
    if weights is not None and len(weights) != len(keys or ()):
        rule = f"gdpo_reward_weights must hold a weight for each of the {len(keys or ())} gdpo_reward_keys"
        raise ValueError(f"{rule}, got {list(weights)}; give as many as keys, or null for 1 each")
    if weights is not None and not any(weights):
        raise ValueError(f"gdpo_reward_weights must hold a weight other than 0, got {list(weights)}; with none of them every advantage is 0")

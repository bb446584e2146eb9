"""Rules of the two KLs, in the reward and in the loss: each acts with all its keys, or is off with all of them. Knows no formula."""

from __future__ import annotations

from collections.abc import Callable

from streamrl.config.base import refuse
from streamrl.config.given import given, value_of
from streamrl.config.objective import uses_reference
from streamrl.config.run import Config


def kl_in_reward_acts(config: Config) -> None:
    algorithm = config.algorithm
    control = given(algorithm.kl_ctrl, "kl_ctrl.")
    if not algorithm.use_kl_in_reward:
        for key in sorted((given(algorithm) & {"kl_penalty"}) | control):
            raise refuse(f"algorithm.{key}", "has no effect with algorithm.use_kl_in_reward=false", value_of(algorithm, key), "set that to true or drop this")
        return
    if algorithm.adv_estimator == "gdpo":
        rule = "has no effect with adv_estimator=gdpo, which reads reward components and not the reward that the KL is taken from"
        raise refuse("algorithm.use_kl_in_reward", rule, True, "use actor.use_kl_loss=true, or another estimator")
    if not algorithm.kl_ctrl.kl_coef > 0:
        rule = "must be above 0 with algorithm.use_kl_in_reward=true: from 0 no KL acts, and an adaptive coefficient never leaves it"
        raise refuse("algorithm.kl_ctrl.kl_coef", rule, algorithm.kl_ctrl.kl_coef, "raise it, or set use_kl_in_reward=false")
    if algorithm.kl_penalty.endswith("+"):
        rule = "must be without '+' in the reward: it chooses a gradient, and the reward has none"
        raise refuse("algorithm.kl_penalty", rule, algorithm.kl_penalty, f"use {algorithm.kl_penalty.removesuffix('+')}, which has the same value")
    if algorithm.kl_ctrl.type == "fixed":
        for key in sorted(control & {"kl_ctrl.target_kl", "kl_ctrl.horizon"}):
            raise refuse(f"algorithm.{key}", "has no effect with kl_ctrl.type=fixed", value_of(algorithm, key), "use type=adaptive or drop it")


def kl_in_loss_acts(config: Config) -> None:
    actor = config.actor
    if not actor.use_kl_loss:
        for key in sorted(given(actor) & {"kl_loss_coef", "kl_loss_type"}):
            raise refuse(f"actor.{key}", "has no effect with actor.use_kl_loss=false", getattr(actor, key), "set that to true or drop this")
    elif not actor.kl_loss_coef > 0:
        rule = "must be above 0 with actor.use_kl_loss=true: a reference would be loaded and weigh nothing"
        raise refuse("actor.kl_loss_coef", rule, actor.kl_loss_coef, "raise it, or set use_kl_loss=false")


def reference_is_used(config: Config) -> None:
    if not uses_reference(config.algorithm, config.actor) and config.ref.path not in (None, config.model.path):
        rule = "has no effect without a KL (algorithm.use_kl_in_reward, actor.use_kl_loss)"
        raise refuse("ref.path", rule, config.ref.path, "switch one of them on or drop it")


def hint_both_kls(config: Config) -> str | None:
    if not (config.algorithm.use_kl_in_reward and config.actor.use_kl_loss):
        return None
    return "algorithm.use_kl_in_reward and actor.use_kl_loss are both on: the policy is held to the reference twice; choose one"


def hint_kl_without_gradient(config: Config) -> str | None:
    actor = config.actor
    if not actor.use_kl_loss or actor.kl_loss_type not in ("kl", "k1"):
        return None
    return f"actor.kl_loss_type={actor.kl_loss_type} as a loss has an expected gradient of 0: it holds nothing; use low_var_kl, mse or {actor.kl_loss_type}+"


RULES: tuple[Callable[[Config], None], ...] = (kl_in_reward_acts, kl_in_loss_acts, reference_is_used)
HINTS: tuple[Callable[[Config], str | None], ...] = (hint_both_kls, hint_kl_without_gradient)

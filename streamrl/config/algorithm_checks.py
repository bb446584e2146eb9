"""Rules of the algorithm's options: one that has no effect in the chosen mode is refused, and so is an input that nothing makes.

An option counts as given when it differs from its default. Estimators and losses of user code may read anything: nothing is refused for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from streamrl.config import estimators, losses
from streamrl.config.base import Section, refuse
from streamrl.config.losses import POLICY_LOSSES, agg_mode
from streamrl.config.objective import acting_loss, needed_columns, reads_rollout_log_probs, uses_reference
from streamrl.config.run import Config
from streamrl.config.training import ActorConfig

MADE_COLUMNS = frozenset({"old_log_probs", "sum_pi_squared", "reward_baselines", "reward_extra_info"})


def given(section: Section, prefix: str = "") -> set[str]:
    """The keys of a section that differ from their defaults."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(section)}
    return {prefix + name for name, default in defaults.items() if getattr(section, name) != default}


def given_for_loss(actor: ActorConfig) -> set[str]:
    """As ``idle_options`` of the losses names them; a resolved clip side that only repeats the default is not given."""
    keys = given(actor) | given(actor.policy_loss, "policy_loss.")
    repeats = {name for name in ("clip_ratio_low", "clip_ratio_high") if getattr(actor, name) == actor.clip_ratio}
    return keys - repeats


def estimator_reads_its_options(config: Config) -> None:
    algorithm = config.algorithm
    for key in estimators.idle_options(algorithm.adv_estimator, given(algorithm)):
        readers = ", ".join(name for name, traits in estimators.ESTIMATORS.items() if key in traits.options)
        raise refuse(
            f"algorithm.{key}",
            f"has no effect with adv_estimator={algorithm.adv_estimator} (read by {readers})",
            getattr(algorithm, key),
            "drop it or choose another estimator",
        )


def estimator_inputs_are_made(config: Config) -> None:
    name, path = config.algorithm.adv_estimator, "algorithm.adv_estimator"
    for column in needed_columns(name):
        if column == "values":
            raise refuse(path, f"{name} reads the column values, which a critic makes, and there is no critic yet", name, "choose another estimator")
        if column not in MADE_COLUMNS:
            raise refuse(path, f"{name} reads the column {column}, which no stage makes", name, "choose another estimator")
    if "sum_pi_squared" in needed_columns(name) and config.algorithm.rollout_correction.bypass_mode:
        rule = f"{name} reads the column sum_pi_squared, which the scoring pass makes, and bypass mode has none"
        raise refuse("algorithm.rollout_correction.bypass_mode", rule, True, "set it to false or choose another estimator")
    if name == "grpo_passk" and config.rollout.n < 2:
        raise refuse("rollout.n", "grpo_passk compares the best sample of a prompt with the second", config.rollout.n, "use at least 2")


def loss_reads_its_options(config: Config) -> None:
    algorithm, actor = config.algorithm, config.actor
    name, correction = acting_loss(algorithm, actor), algorithm.rollout_correction
    idle = losses.idle_options(name, given_for_loss(actor))
    if name == "bypass_mode" and correction.loss_type == "reinforce":
        name, idle = "loss_type=reinforce", idle + sorted(given_for_loss(actor) & POLICY_LOSSES["bypass_mode"].options)
    for key in idle:
        raise refuse(f"actor.{key}", f"has no effect on the loss that acts, {name}", _value(actor, key), "drop it or choose another loss")


def bypass_chooses_the_loss(config: Config) -> None:
    mode, bypass = config.actor.policy_loss.loss_mode, config.algorithm.rollout_correction.bypass_mode
    if bypass and mode not in ("vanilla", "bypass_mode"):
        rule = "has no effect with algorithm.rollout_correction.bypass_mode=true, which chooses the loss by its loss_type"
        raise refuse("actor.policy_loss.loss_mode", rule, mode, "drop one of the two")
    if mode == "bypass_mode" and not bypass:
        rule = "bypass_mode is the loss of algorithm.rollout_correction.bypass_mode, which is false"
        raise refuse("actor.policy_loss.loss_mode", rule, mode, "set bypass_mode=true there, or choose another loss")


def correction_thresholds_act(config: Config) -> None:
    correction = config.algorithm.rollout_correction
    if correction.rollout_is is None and "rollout_is_threshold" in given(correction):
        path = "algorithm.rollout_correction.rollout_is_threshold"
        raise refuse(path, "has no effect with rollout_is=null", correction.rollout_is_threshold, "drop it, or set rollout_is=token")


def correction_has_log_probs(config: Config) -> None:
    correction = config.algorithm.rollout_correction
    if reads_rollout_log_probs(config.algorithm) and not config.rollout.calculate_log_probs:
        keys = [key for key in ("rollout_is", "rollout_rs", "bypass_mode") if getattr(correction, key)]
        why = ", ".join(f"{key}={getattr(correction, key)}" for key in keys)
        rule = f"algorithm.rollout_correction.{why} needs the log-probs of the engine"
        raise refuse("rollout.calculate_log_probs", rule, False, f"set it to true, or switch {' and '.join(keys)} off")


def kl_options_act(config: Config) -> None:
    algorithm, actor = config.algorithm, config.actor
    control = given(algorithm.kl_ctrl, "kl_ctrl.")
    if not algorithm.use_kl_in_reward:
        for key in sorted((given(algorithm) & {"kl_penalty"}) | control):
            raise refuse(f"algorithm.{key}", "has no effect with algorithm.use_kl_in_reward=false", _value(algorithm, key), "set that to true or drop this")
    elif algorithm.kl_ctrl.type == "fixed":
        for key in sorted(control & {"kl_ctrl.target_kl", "kl_ctrl.horizon"}):
            raise refuse(f"algorithm.{key}", "has no effect with kl_ctrl.type=fixed", _value(algorithm, key), "use type=adaptive or drop it")
    if not actor.use_kl_loss:
        for key in sorted(given(actor) & {"kl_loss_coef", "kl_loss_type"}):
            raise refuse(f"actor.{key}", "has no effect with actor.use_kl_loss=false", getattr(actor, key), "set that to true or drop this")
    if not uses_reference(algorithm, actor) and config.ref.path not in (None, config.model.path):
        rule = "has no effect without a KL (algorithm.use_kl_in_reward, actor.use_kl_loss)"
        raise refuse("ref.path", rule, config.ref.path, "switch one of them on or drop it")
    for path, value in (("actor.kl_loss_coef", actor.kl_loss_coef), ("actor.entropy_coeff", actor.entropy_coeff)):
        if value < 0:
            raise refuse(path, "must be 0 or above", value, "correct this value")


def hint_lonely_samples(config: Config) -> str | None:
    name = config.algorithm.adv_estimator
    if config.rollout.n > 1 or not estimators.is_group_estimator(name):
        return None
    return f"rollout.n is 1 with adv_estimator={name}: a group of one has no baseline, its advantage is its raw reward; use rollout.n of 4 or more"


def hint_uncorrected(config: Config) -> str | None:
    correction = config.algorithm.rollout_correction
    if correction.rollout_is is not None or correction.bypass_mode or config.replay.max_staleness == 0:
        return None
    return (
        f"OFF-POLICY CORRECTION IS OFF while replay.max_staleness is {config.replay.max_staleness}: samples of older policies are trained as if they were "
        "fresh, which biases the gradient and can collapse the run; set algorithm.rollout_correction.rollout_is=token, or replay.max_staleness=0"
    )


def hint_cut_support(config: Config) -> str | None:
    rollout = config.rollout
    cut = [name for name, on in (("top_p", rollout.top_p < 1), ("top_k", rollout.top_k != -1), ("repetition_penalty", rollout.repetition_penalty != 1)) if on]
    if not cut or not reads_rollout_log_probs(config.algorithm):
        return None
    return (
        f"rollout.{' and '.join(cut)} changes the distribution that is sampled from, the learner computes the full one: importance weights are biased; "
        "train with top_p=1.0, top_k=-1, repetition_penalty=1.0"
    )


def hint_both_kls(config: Config) -> str | None:
    if not (config.algorithm.use_kl_in_reward and config.actor.use_kl_loss):
        return None
    return "algorithm.use_kl_in_reward and actor.use_kl_loss are both on: the policy is held to the reference twice; choose one"


def hint_kl_without_gradient(config: Config) -> str | None:
    actor = config.actor
    if not actor.use_kl_loss or actor.kl_loss_type not in ("kl", "k1"):
        return None
    return f"actor.kl_loss_type={actor.kl_loss_type} as a loss has an expected gradient of 0: it holds nothing; use low_var_kl, mse or {actor.kl_loss_type}+"


def hint_token_sum(config: Config) -> str | None:
    if agg_mode(config.actor) != "token-sum":
        return None
    return "actor.loss_agg_mode=token-sum grows with batch and answer length, and so does the step's size before clipping; a mean is usual"


def _value(section: Any, path: str) -> Any:
    for name in path.split("."):
        section = getattr(section, name)
    return section


RULES: tuple[Callable[[Config], None], ...] = (
    estimator_inputs_are_made,
    estimator_reads_its_options,
    bypass_chooses_the_loss,
    loss_reads_its_options,
    correction_thresholds_act,
    correction_has_log_probs,
    kl_options_act,
)
HINTS: tuple[Callable[[Config], str | None], ...] = (
    hint_lonely_samples,
    hint_uncorrected,
    hint_cut_support,
    hint_both_kls,
    hint_kl_without_gradient,
    hint_token_sum,
)

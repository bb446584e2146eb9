"""Rules of the algorithm's options: one that has no effect in the chosen mode is refused, and so is an input that nothing makes.

An option counts as given when it differs from its default. Estimators and losses of user code may read anything: nothing is refused for them.
"""

from __future__ import annotations

from collections.abc import Callable

from streamrl.config import estimators, kl_checks, losses
from streamrl.config.base import refuse
from streamrl.config.given import given, value_of
from streamrl.config.losses import POLICY_LOSSES, agg_mode
from streamrl.config.objective import acting_loss, needed_columns, reads_rollout_log_probs
from streamrl.config.run import Config
from streamrl.config.training import ActorConfig

MADE_COLUMNS = frozenset({"old_log_probs", "sum_pi_squared", "reward_baselines", "reward_extra_info", "values"})


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
        if column not in MADE_COLUMNS:
            raise refuse(path, f"{name} reads the column {column}, which no stage makes", name, "choose another estimator")
    if "sum_pi_squared" in needed_columns(name) and config.algorithm.rollout_correction.bypass_mode:
        rule = f"{name} reads the column sum_pi_squared, which the scoring pass makes, and bypass mode has none"
        raise refuse("algorithm.rollout_correction.bypass_mode", rule, True, "set it to false or choose another estimator")
    if name == "grpo_passk" and config.rollout.n < 2:
        raise refuse("rollout.n", "grpo_passk compares the best sample of a prompt with the second", config.rollout.n, "use at least 2")
    if name == "rloo_vectorized" and config.rollout.n < 2:
        raise refuse("rollout.n", "rloo_vectorized gives a group of one no advantage: nothing is trained", config.rollout.n, "use at least 2, or rloo")


def group_stats_differ(config: Config) -> None:
    """Samples without a finite score count nowhere; it takes a rule of rejection to make "accepted" and "all" two sets."""
    algorithm, correction = config.algorithm, config.algorithm.rollout_correction
    if algorithm.group_stats == "accepted" or algorithm.adv_estimator not in estimators.ESTIMATORS:
        return
    if correction.bypass_mode or correction.rollout_rs is None:
        why = "bypass_mode=true, which rejects after the advantages are made" if correction.bypass_mode else "rollout_rs=null, which rejects no sample"
        raise refuse("algorithm.group_stats", f"has no effect with algorithm.rollout_correction.{why}", algorithm.group_stats, "drop it or give a rule")


def filter_metric_acts(config: Config) -> None:
    groups = config.algorithm.filter_groups
    if not groups.enable and "metric" in given(groups):
        path, rule = "algorithm.filter_groups.metric", "has no effect with algorithm.filter_groups.enable=false"
        raise refuse(path, rule, groups.metric, "set that to true or drop this")


def loss_reads_its_options(config: Config) -> None:
    algorithm, actor = config.algorithm, config.actor
    name, correction = acting_loss(algorithm, actor), algorithm.rollout_correction
    idle = losses.idle_options(name, given_for_loss(actor))
    if name == "bypass_mode" and correction.loss_type == "reinforce":
        name, idle = "loss_type=reinforce", idle + sorted(given_for_loss(actor) & POLICY_LOSSES["bypass_mode"].options)
    for key in idle:
        raise refuse(f"actor.{key}", f"has no effect on the loss that acts, {name}", value_of(actor, key), "drop it or choose another loss")


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


def hint_lonely_samples(config: Config) -> str | None:
    name = config.algorithm.adv_estimator
    if config.rollout.n > 1 or not estimators.is_group_estimator(name):
        return None
    left = estimators.ALONE.get(name, "its advantage is its raw reward")
    return f"rollout.n is 1 with adv_estimator={name}: a group of one has no baseline of its own, {left}; use rollout.n of 4 or more"


def hint_uncorrected(config: Config) -> str | None:
    correction = config.algorithm.rollout_correction
    clipped = correction.bypass_mode and correction.loss_type == "ppo_clip"  # its ratio is taken over the policy that sampled
    if correction.rollout_is is not None or clipped or config.replay.max_staleness == 0:
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


def hint_token_sum(config: Config) -> str | None:
    if agg_mode(config.actor) != "token-sum":
        return None
    return "actor.loss_agg_mode=token-sum grows with batch and answer length, and so does the step's size before clipping; a mean is usual"


RULES: tuple[Callable[[Config], None], ...] = (
    estimator_inputs_are_made,
    estimator_reads_its_options,
    bypass_chooses_the_loss,
    loss_reads_its_options,
    correction_thresholds_act,
    correction_has_log_probs,
    group_stats_differ,
    filter_metric_acts,
    *kl_checks.RULES,
)
HINTS: tuple[Callable[[Config], str | None], ...] = (
    hint_lonely_samples,
    hint_uncorrected,
    hint_cut_support,
    *kl_checks.HINTS,
    hint_token_sum,
)

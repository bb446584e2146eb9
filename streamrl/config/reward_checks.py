"""Rules of the reward section: what would have no effect, and what asks for a score before there is one."""

from __future__ import annotations

import re
from collections.abc import Callable

from streamrl.config.base import refuse
from streamrl.config.given import given
from streamrl.config.objective import needed_columns
from streamrl.config.reward import MANAGERS, model_keys
from streamrl.config.run import Config


def one_scorer_per_row(config: Config) -> None:
    models = model_keys(config.reward)
    if len(models) > 1:
        raise refuse(models[1], f"only one model scores the rows of style model, and {models[0]} is given too", "both", "drop one")
    if models and config.reward.custom_reward_function is not None:
        rule = "has no effect with reward.custom_reward_function, which scores every row"
        raise refuse(models[0], rule, "both", "drop one; a function may ask a model by itself")


def managers_read_their_options(config: Config) -> None:
    """A manager of user code may read anything."""
    reward = config.reward
    for key, manager in (("overlong_buffer", "dapo"), ("limited", "limited")):
        options = given(getattr(reward, key))
        if options and reward.reward_manager in MANAGERS and reward.reward_manager != manager:
            rule = f"has no effect with reward.reward_manager={reward.reward_manager}"
            raise refuse(f"reward.{key}", rule, sorted(options), f"set reward.reward_manager={manager} or drop it")
    if reward.reward_manager == "limited" and not given(reward.limited):
        raise refuse("reward.limited", "must set a limit with reward.reward_manager=limited", "none", "set reward.limited.max_concurrency")


def overlong_buffer_fits(config: Config) -> None:
    buffer, longest = config.reward.overlong_buffer, config.data.max_response_length
    if not buffer.enable and (idle := sorted(given(buffer))):
        raise refuse(f"reward.overlong_buffer.{idle[0]}", "has no effect with enable=false", getattr(buffer, idle[0]), "set that to true or drop this")
    if buffer.enable and not 0 < buffer.len <= longest:
        raise refuse("reward.overlong_buffer.len", f"must be 1 to data.max_response_length ({longest}) tokens", buffer.len, "correct it")
    if buffer.enable and not buffer.penalty_factor > 0:
        raise refuse("reward.overlong_buffer.penalty_factor", "must be above 0", buffer.penalty_factor, "use 1.0")


def limits_can_be_shared(config: Config) -> None:
    for name in sorted(given(config.reward.limited)):
        value, actors = getattr(config.reward.limited, name), config.rollout.num_actors
        if value < actors:
            raise refuse(f"reward.limited.{name}", f"is shared by rollout.num_actors ({actors}), at least 1 for each", value, "raise it")


def components_have_a_reader(config: Config) -> None:
    if config.reward.reward_manager == "gdpo" and config.algorithm.adv_estimator != "gdpo":
        rule = "gdpo looks for the components that algorithm.adv_estimator=gdpo reads, and that is"
        raise refuse("reward.reward_manager", f"{rule} {config.algorithm.adv_estimator}", "gdpo", "use naive, or that estimator")


def reward_model_acts(config: Config) -> None:
    model = config.reward.reward_model
    if model.enable and not (model.model_path or "").strip():
        raise refuse("reward.reward_model.model_path", "is required with enable=true", model.model_path, "name a sequence classifier with one label")
    if not model.enable and (idle := sorted(given(model))):
        raise refuse(f"reward.reward_model.{idle[0]}", "has no effect with enable=false", getattr(model, idle[0]), "set that to true or drop this")


def scores_come_in_time(config: Config) -> None:
    """A reward model scores after the rollout: what a rollout makes of a score is not there."""
    if not config.reward.reward_model.enable:
        return
    estimator = config.algorithm.adv_estimator
    early = (
        ("algorithm.filter_groups.enable", config.algorithm.filter_groups.enable, True),
        ("reward.turn_level", config.reward.turn_level, True),
        ("algorithm.adv_estimator", estimator == "gdpo" or "reward_baselines" in needed_columns(estimator), estimator),
    )
    for path, asks, value in early:
        if asks:
            rule = "needs scores during the rollout, and reward.reward_model scores afterwards"
            raise refuse(path, rule, value, "drop it, or use reward.judge or reward.remote")


def judge_is_sane(config: Config) -> None:
    judge = config.reward.judge
    if judge is None:
        return
    problems = (
        ("model_path", judge.model_path.strip(), "must not be empty", "name a language model with a chat template"),
        ("prompt", "{answer}" in judge.prompt, "must hold {answer}; {question} and {ground_truth} are known too", "add it"),
        ("score_pattern", _has_one_group(judge.score_pattern), "must be a regular expression with one group, the score", "put (...) around the number"),
        ("temperature", judge.temperature >= 0, "must be 0 (greedy) or above", "use 0.0"),
        ("score_range", judge.score_range is None or judge.score_range[0] < judge.score_range[1], "must be [low, high], low below high", "correct it"),
    )
    for name, holds, rule, todo in problems:
        if not holds:
            raise refuse(f"reward.judge.{name}", rule, getattr(judge, name), todo)


def _has_one_group(pattern: str) -> bool:
    try:
        return re.compile(pattern).groups == 1
    except re.error:
        return False


def remote_is_http(config: Config) -> None:
    remote = config.reward.remote
    if remote is not None and not remote.url.startswith(("http://", "https://")):
        raise refuse("reward.remote.url", "must begin with http:// or https://", remote.url, "give the scorer's address")


def hint_plain_dapo(config: Config) -> str | None:
    if config.reward.reward_manager != "dapo" or config.reward.overlong_buffer.enable:
        return None
    return "reward.reward_manager=dapo does nothing without reward.overlong_buffer.enable=true; scores are those of naive"


def hint_slow_limit(config: Config) -> str | None:
    per_minute = config.reward.limited.max_requests_per_minute
    minutes = config.data.train_batch_size * config.rollout.n / (per_minute or 1)
    if per_minute is None or minutes * 60 < config.replay.take_timeout_s:
        return None
    return (
        f"reward.limited.max_requests_per_minute={per_minute} scores a batch in {minutes:.0f} minutes, longer than the learner waits for one "
        f"(replay.take_timeout_s={config.replay.take_timeout_s:g}); raise one of the two"
    )


RULES: tuple[Callable[[Config], None], ...] = (
    one_scorer_per_row,
    managers_read_their_options,
    overlong_buffer_fits,
    limits_can_be_shared,
    components_have_a_reader,
    reward_model_acts,
    scores_come_in_time,
    judge_is_sane,
    remote_is_http,
)
HINTS: tuple[Callable[[Config], str | None], ...] = (hint_plain_dapo, hint_slow_limit)

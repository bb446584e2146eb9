"""Rules of section ``critic``: it is there when something reads its values, and without it none of its keys is given. Its mini-batches, micro-batches
and optimizer follow the rules of the actor's (``update_checks``)."""

from __future__ import annotations

from collections.abc import Callable

from streamrl.config.base import refuse
from streamrl.config.given import given
from streamrl.config.objective import needed_columns, uses_critic
from streamrl.config.run import Config


def values_are_made(config: Config) -> None:
    name = config.algorithm.adv_estimator
    if "values" in needed_columns(name) and not uses_critic(config):
        rule = f"must not be false with adv_estimator={name}, which reads the column values that a critic makes"
        raise refuse("critic.enable", rule, False, "drop it, or choose another estimator")


def critic_is_used(config: Config) -> None:
    if uses_critic(config):
        return
    why = f"has no effect without a critic (adv_estimator={config.algorithm.adv_estimator} reads no values)"
    for key in sorted(given(config.critic) - {"enable"}):
        raise refuse(f"critic.{key}", why, getattr(config.critic, key), "drop it or choose gae")
    if config.trainer.critic_warmup:
        raise refuse("trainer.critic_warmup", why, config.trainer.critic_warmup, "drop it or choose gae")


def values_may_move(config: Config) -> None:
    if uses_critic(config) and not config.critic.cliprange_value > 0:
        raise refuse("critic.cliprange_value", "must be above 0", config.critic.cliprange_value, "correct this value")


def warm_up_ends(config: Config) -> None:
    steps, warmup = config.trainer.total_training_steps, config.trainer.critic_warmup
    if steps is not None and warmup >= steps:
        raise refuse("trainer.critic_warmup", f"must be below trainer.total_training_steps ({steps}), or the policy is never trained", warmup, "lower it")


def hint_unread_critic(config: Config) -> str | None:
    """An estimator of user code may read values."""
    name = config.algorithm.adv_estimator
    if not uses_critic(config) or ":" in name or "values" in needed_columns(name):
        return None
    return f"critic.enable is true with adv_estimator={name}, which reads no values: a critic is trained and nothing reads it; drop it or choose gae"


RULES: tuple[Callable[[Config], None], ...] = (values_are_made, critic_is_used, values_may_move, warm_up_ends)
HINTS: tuple[Callable[[Config], str | None], ...] = (hint_unread_critic,)

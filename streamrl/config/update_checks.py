"""Rules of an update's mini-batches, micro-batches and schedule, and of the probe behind it: a key that cannot act is refused."""

from __future__ import annotations

from collections.abc import Callable

from streamrl.config.base import refuse
from streamrl.config.given import given
from streamrl.config.run import Config
from streamrl.config.training import PROBE_TOLERANCE_NATS


def micro_batches_are_chosen_once(config: Config) -> None:
    actor, longest = config.actor, config.data.max_prompt_length + config.data.max_response_length
    if actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu is not None:
        raise refuse(
            "actor.ppo_micro_batch_size_per_gpu",
            "must be null with actor.use_dynamic_bsz=true, which sizes micro-batches by actor.ppo_max_token_len_per_gpu",
            actor.ppo_micro_batch_size_per_gpu,
            "choose one of the two",
        )
    if actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu < longest:
        raise refuse(
            "actor.ppo_max_token_len_per_gpu",
            f"must hold the longest row, data.max_prompt_length + data.max_response_length = {longest} tokens",
            actor.ppo_max_token_len_per_gpu,
            "raise it or shorten the rows",
        )
    if not actor.use_dynamic_bsz and "ppo_max_token_len_per_gpu" in given(actor):
        path, rule = "actor.ppo_max_token_len_per_gpu", "has no effect with actor.use_dynamic_bsz=false"
        raise refuse(path, rule, actor.ppo_max_token_len_per_gpu, "set that to true or drop this")


def order_and_schedule_act(config: Config) -> None:
    actor, optim = config.actor, config.actor.optim
    if not actor.shuffle and "data_loader_seed" in given(actor):
        raise refuse("actor.data_loader_seed", "has no effect with actor.shuffle=false", actor.data_loader_seed, "set that to true or drop this")
    if optim.lr_scheduler_type == "constant" and optim.min_lr_ratio != 0:
        rule = "has no effect with actor.optim.lr_scheduler_type=constant"
        raise refuse("actor.optim.min_lr_ratio", rule, optim.min_lr_ratio, "use cosine or drop it")


def clip_ratio_acts(config: Config) -> None:
    """A loss of user code may read ``clip_ratio`` itself."""
    actor = config.actor
    sides = (actor.clip_ratio_low, actor.clip_ratio_high)
    if "clip_ratio" in given(actor) and None not in sides and actor.clip_ratio not in sides and ":" not in actor.policy_loss.loss_mode:
        rule = f"has no effect with both actor.clip_ratio_low={sides[0]} and actor.clip_ratio_high={sides[1]} set"
        raise refuse("actor.clip_ratio", rule, actor.clip_ratio, "drop it, or one of the sides")


def probe_tolerance_acts(config: Config) -> None:
    weights = config.weights
    if not weights.probe and weights.probe_tolerance not in (None, PROBE_TOLERANCE_NATS[config.rollout.dtype]):
        raise refuse("weights.probe_tolerance", "has no effect with weights.probe=false", weights.probe_tolerance, "set that to true or drop this")


def hint_idle_shuffle(config: Config) -> str | None:
    actor = config.actor
    if not actor.shuffle or actor.ppo_epochs > 1 or config.data.train_batch_size != actor.ppo_mini_batch_size:
        return None
    return "actor.shuffle is without effect: one epoch of one mini-batch has no order; use a smaller actor.ppo_mini_batch_size or more ppo_epochs"


RULES: tuple[Callable[[Config], None], ...] = (micro_batches_are_chosen_once, order_and_schedule_act, clip_ratio_acts, probe_tolerance_acts)
HINTS: tuple[Callable[[Config], str | None], ...] = (hint_idle_shuffle,)

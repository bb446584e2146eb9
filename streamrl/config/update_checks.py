"""Rules of an update's mini-batches, micro-batches, optimizer and schedule, of actor and critic, and of the probe behind it: a key that cannot act is
refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from streamrl.config.base import refuse
from streamrl.config.batching import Batching, critic_batching
from streamrl.config.given import given
from streamrl.config.objective import uses_critic
from streamrl.config.run import Config
from streamrl.config.training import PROBE_TOLERANCE_NATS, OptimConfig


class _Update(NamedTuple):
    """One trained model: its section, how that cuts a batch, and which of its keys were given."""

    path: str
    batching: Batching
    optim: OptimConfig
    grad_clip: float
    given: set[str]


def _updates(config: Config) -> list[_Update]:
    """The actor, and the critic when there is one; a key of the critic that repeats the actor's is not given: resolving writes it there."""
    actor, critic = config.actor, config.critic
    updates = [_Update("actor", actor, actor.optim, actor.grad_clip, given(actor))]
    if uses_critic(config):
        own = {key for key in given(critic) if getattr(critic, key) != getattr(actor, key, None)}
        updates.append(_Update("critic", critic_batching(critic, actor), critic.optim, critic.grad_clip, own))
    return updates


def mini_batches_fill_the_batch(config: Config) -> None:
    batch = config.data.train_batch_size
    for path, batching, *_ in _updates(config):
        if batch % batching.ppo_mini_batch_size:
            raise refuse(
                f"{path}.ppo_mini_batch_size",
                f"data.train_batch_size ({batch} prompts) must be a multiple of it",
                batching.ppo_mini_batch_size,
                f"use a divisor of {batch}; both count prompts, not trajectories",
            )


def micro_batches_are_chosen_once(config: Config) -> None:
    longest = config.data.max_prompt_length + config.data.max_response_length
    for path, batching, _, _, own in _updates(config):
        if batching.use_dynamic_bsz and batching.ppo_micro_batch_size_per_gpu is not None:
            raise refuse(
                f"{path}.ppo_micro_batch_size_per_gpu",
                f"must be null with {path}.use_dynamic_bsz=true, which sizes micro-batches by {path}.ppo_max_token_len_per_gpu",
                batching.ppo_micro_batch_size_per_gpu,
                "choose one of the two",
            )
        if batching.use_dynamic_bsz and batching.ppo_max_token_len_per_gpu < longest:
            raise refuse(
                f"{path}.ppo_max_token_len_per_gpu",
                f"must hold the longest row, data.max_prompt_length + data.max_response_length = {longest} tokens",
                batching.ppo_max_token_len_per_gpu,
                "raise it or shorten the rows",
            )
        if not batching.use_dynamic_bsz and "ppo_max_token_len_per_gpu" in own:
            rule = f"has no effect with {path}.use_dynamic_bsz=false"
            raise refuse(f"{path}.ppo_max_token_len_per_gpu", rule, batching.ppo_max_token_len_per_gpu, "set that to true or drop this")


def scoring_budget_acts(config: Config) -> None:
    tokens, longest = config.actor.log_prob_max_token_len_per_gpu, config.data.max_prompt_length + config.data.max_response_length
    if tokens is None:
        return
    if not any(batching.use_dynamic_bsz for _, batching, *_ in _updates(config)):
        rule = "has no effect with actor.use_dynamic_bsz=false"
        raise refuse("actor.log_prob_max_token_len_per_gpu", rule, tokens, "set that to true or drop this")
    if tokens < longest:
        rule = f"must hold the longest row, data.max_prompt_length + data.max_response_length = {longest} tokens"
        raise refuse("actor.log_prob_max_token_len_per_gpu", rule, tokens, "raise it or shorten the rows")


def order_and_schedule_act(config: Config) -> None:
    for path, batching, optim, _, own in _updates(config):
        if not batching.shuffle and "data_loader_seed" in own:
            rule = f"has no effect with {path}.shuffle=false"
            raise refuse(f"{path}.data_loader_seed", rule, batching.data_loader_seed, "set that to true or drop this")
        if optim.lr_scheduler_type == "constant" and optim.min_lr_ratio != 0:
            rule = f"has no effect with {path}.optim.lr_scheduler_type=constant"
            raise refuse(f"{path}.optim.min_lr_ratio", rule, optim.min_lr_ratio, "use cosine or drop it")
        steps = config.trainer.total_training_steps
        if steps is not None and optim.lr_warmup_steps > steps:
            rule = f"must not exceed trainer.total_training_steps ({steps})"
            raise refuse(f"{path}.optim.lr_warmup_steps", rule, optim.lr_warmup_steps, "shorten the warm-up or train longer")
        if optim.lr_warmup_steps and optim.lr_warmup_steps_ratio:
            rule = f"has no effect with {path}.optim.lr_warmup_steps={optim.lr_warmup_steps}"
            raise refuse(f"{path}.optim.lr_warmup_steps_ratio", rule, optim.lr_warmup_steps_ratio, "give one of the two")


def optimizers_are_sane(config: Config) -> None:
    for path, _, optim, grad_clip, _ in _updates(config):
        limits = [
            ("optim.lr", optim.lr, optim.lr >= 0, "0 or above"),
            ("optim.weight_decay", optim.weight_decay, optim.weight_decay >= 0, "0 or above"),
            ("optim.betas", optim.betas, all(0 <= beta < 1 for beta in optim.betas), "two numbers from 0 up to, but not including, 1"),
            ("optim.min_lr_ratio", optim.min_lr_ratio, 0 <= optim.min_lr_ratio <= 1, "between 0 and 1"),
            ("grad_clip", grad_clip, grad_clip > 0, "above 0"),
        ]
        for key, value, holds, rule in limits:
            if not holds:
                raise refuse(f"{path}.{key}", f"must be {rule}", value, "correct this value")


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


RULES: tuple[Callable[[Config], None], ...] = (
    mini_batches_fill_the_batch,
    micro_batches_are_chosen_once,
    scoring_budget_acts,
    order_and_schedule_act,
    optimizers_are_sane,
    clip_ratio_acts,
    probe_tolerance_acts,
)
HINTS: tuple[Callable[[Config], str | None], ...] = (hint_idle_shuffle,)

"""Rules of how a model is spread over the learner ranks (``learner``, ``ref.param_offload``): what cannot act is refused, or said when it is harmless."""

from __future__ import annotations

from collections.abc import Callable

from streamrl.config.base import refuse
from streamrl.config.objective import uses_reference
from streamrl.config.run import Config


def shards_fill_the_ranks(config: Config) -> None:
    size, ranks = config.learner.fsdp_size, config.learner.ranks
    if size != -1 and (size < 1 or ranks % size):
        rule = f"must be -1 (all ranks) or a divisor of learner.ranks={ranks}, so that every copy of the weights has equally many"
        raise refuse("learner.fsdp_size", rule, size, "use a divisor")


def sharding_options_act(config: Config) -> None:
    learner = config.learner
    size = learner.ranks if learner.fsdp_size == -1 else learner.fsdp_size
    if not learner.reshard_after_forward and size == 1:
        rule = f"has no effect with learner.ranks={learner.ranks} and learner.fsdp_size={learner.fsdp_size}: a rank holds all weights"
        raise refuse("learner.reshard_after_forward", rule, False, "drop it")
    if learner.sync_every_micro_batch and learner.ranks == 1:
        raise refuse("learner.sync_every_micro_batch", "has no effect with learner.ranks=1: there is no other rank to reduce with", True, "drop it")


def reference_offload_acts(config: Config) -> None:
    offload = config.ref.param_offload
    if offload is None:
        return
    if not uses_reference(config.algorithm, config.actor):
        rule = "has no effect without a KL (algorithm.use_kl_in_reward, actor.use_kl_loss)"
        raise refuse("ref.param_offload", rule, offload, "switch one of them on or drop it")
    if config.model.lora_rank > 0 and config.ref.path in (None, config.model.path):
        rule = "has no effect with model.lora_rank above 0: the reference is the policy's own base"
        raise refuse("ref.param_offload", rule, offload, "use learner.param_offload, or drop it")


def hint_idle_offload(config: Config) -> str | None:
    learner, ref = config.learner, config.ref
    if learner.num_gpus_per_rank == 0:
        asked = [
            ("learner.param_offload", learner.param_offload),
            ("learner.optimizer_offload", learner.optimizer_offload),
            ("ref.param_offload", ref.param_offload),
        ]
        names = ", ".join(name for name, value in asked if value)
        return f"{names}: without effect with learner.num_gpus_per_rank=0, everything lies in the CPU's memory" if names else None
    if learner.param_offload and learner.optimizer_offload:
        return "learner.optimizer_offload is without effect: learner.param_offload keeps the optimizer on the CPU too"
    return None


def sharing_acts(config: Config) -> None:
    if not config.learner.shared_prompts and config.model.use_remove_padding is False:
        rule = "has no effect with model.use_remove_padding=false: right-padded rows share nothing"
        raise refuse("learner.shared_prompts", rule, False, "drop it")


RULES: tuple[Callable[[Config], None], ...] = (sharing_acts, shards_fill_the_ranks, sharding_options_act, reference_offload_acts)
HINTS: tuple[Callable[[Config], str | None], ...] = (hint_idle_offload,)

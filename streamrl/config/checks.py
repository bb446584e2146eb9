"""Rules that span sections, each one function with one message, checked before anything is started.

``check`` raises ConfigError for what would fail, deadlock or train something else than asked; it returns warnings for what is legal but
probably not meant. Knows nothing of the machine: resources are the launcher's business, files the data package's.
"""

from __future__ import annotations

from collections.abc import Callable

from streamrl.config import algorithm_checks, critic_checks, learner_checks, reward_checks, update_checks
from streamrl.config.base import refuse
from streamrl.config.run import Config, TrainerConfig
from streamrl.config.tools import one_of


def check(config: Config) -> list[str]:
    """Warnings, in the order of the sections; ConfigError at the first broken rule."""
    for rule in _RULES:
        rule(config)
    return [text for text in (hint(config) for hint in _HINTS) if text]


def data_is_given(config: Config) -> None:
    if not config.data.train_files:
        raise refuse("data.train_files", "training needs at least one file", config.data.train_files, "give a parquet, json or jsonl file")


def names_are_given(config: Config) -> None:
    named = (("model.path", config.model.path), ("run.name", config.run.name), ("run.dir", config.run.dir))
    custom = config.data.custom_cls
    optional = (
        ("run.folder", config.run.folder),
        ("model.tokenizer_path", config.model.tokenizer_path),
        ("critic.path", config.critic.path),
        ("cluster.address", config.cluster.address),
        ("data.cache_dir", config.data.cache_dir),
        ("data.tool_config_path", config.data.tool_config_path),
        ("data.function_tool_path", config.data.function_tool_path),
        ("rollout.multi_turn.tool_config_path", config.rollout.multi_turn.tool_config_path),
        ("rollout.multi_turn.function_tool_path", config.rollout.multi_turn.function_tool_path),
        *((f"data.custom_cls.{name}", getattr(custom, name)) for name in ("path", "name") if custom is not None),
    )
    for path, value in (*named, *optional):
        if value is not None and not value.strip():
            raise refuse(path, "must not be empty", value, "give a name, or leave the key out where it has a default")


def seeds_suit_every_generator(config: Config) -> None:
    for path, value in (("run.seed", config.run.seed), ("data.seed", config.data.seed)):
        if value is not None and not 0 <= value < 2**32:
            raise refuse(path, "must be 0 or above and below 2**32, as numpy's generators take it", value, "use a smaller number, or null to draw one")


def template_options_are_free(config: Config) -> None:
    taken = sorted({"add_generation_prompt", "tokenize", "return_dict", "tools"} & set(config.data.apply_chat_template_kwargs))
    if taken:
        raise refuse("data.apply_chat_template_kwargs", "must not name what the trainer sets itself", ", ".join(taken), "remove it")


def tool_files_have_one_path(config: Config) -> None:
    data, multi = config.data, config.rollout.multi_turn
    one_of(data.tool_config_path, multi.tool_config_path, "tool_config_path")
    one_of(data.function_tool_path, multi.function_tool_path, "function_tool_path")


def sample_limit_fills_a_batch(config: Config) -> None:
    limit, batch = config.data.max_samples, config.data.train_batch_size
    if limit != -1 and limit < batch:
        raise refuse("data.max_samples", f"must be -1 (all rows) or at least train_batch_size ({batch})", limit, "raise it, or lower train_batch_size")
    if config.data.val_max_samples < -1:
        raise refuse("data.val_max_samples", "must be -1 (all rows) or a count", config.data.val_max_samples, "use -1 for all rows")


def batches_are_those_of_a_stream(config: Config) -> None:
    data = config.data
    if data.gen_batch_size not in (None, 1):
        raise refuse("data.gen_batch_size", "must be null or 1: replay takes prompts one by one, as groups end", data.gen_batch_size, "leave it out")
    if data.val_batch_size is not None:
        rule = "must be null: all validation rows are dealt to the rollout actors at once, rollout.max_sessions_per_actor of them at a time on each"
        raise refuse("data.val_batch_size", rule, data.val_batch_size, "leave it out")


def mixtures_have_a_weight_per_file(config: Config) -> None:
    data = config.data
    if data.train_weights is None:
        return
    files = [data.train_files] if isinstance(data.train_files, str) else data.train_files
    if len(data.train_weights) != len(files) or not all(weight > 0 for weight in data.train_weights):
        rule = f"must be null or a weight above 0 for each of the {len(files)} files in data.train_files"
        raise refuse("data.train_weights", rule, data.train_weights, "give one number per file, in their order")
    if data.custom_cls is not None:
        raise refuse("data.train_weights", "must be null with data.custom_cls, which alone knows its files", data.train_weights, "mix in the class")


def one_version_per_step(config: Config) -> None:
    if config.trainer.parameter_sync_step != 1:
        raise refuse("trainer.parameter_sync_step", "only 1 is supported: every training step publishes a version", config.trainer.parameter_sync_step, "use 1")


def frequencies_are_steps(config: Config) -> None:
    for name in ("save_freq", "test_freq"):
        value = getattr(config.trainer, name)
        if value != -1 and value < 1:
            raise refuse(f"trainer.{name}", "must be -1 (only at the end) or a positive number of steps", value, "use -1 or a step count")


def resume_is_unambiguous(config: Config) -> None:
    mode, path = config.trainer.resume_mode, config.trainer.resume_from_path
    if mode == "resume_path" and path is None:
        raise refuse("trainer.resume_from_path", "is required with trainer.resume_mode=resume_path", path, "give the run folder, or use resume_mode=auto")
    if mode != "resume_path" and path is not None:
        raise refuse("trainer.resume_mode", f"must be resume_path when trainer.resume_from_path ({path}) is set", mode, "set both or neither")
    if mode == "auto" and config.run.folder is None:
        raise refuse("run.folder", "is required with trainer.resume_mode=auto: a folder named by the time is never found again", None, "name the run folder")


def sampling_is_a_distribution(config: Config) -> None:
    rollout = config.rollout
    if rollout.temperature < 0.01:  # engines raise lower ones to it, or sample greedily, which the learner would not know
        raise refuse(
            "rollout.temperature", "training samples need a temperature of at least 0.01", rollout.temperature, "use 1.0; greedy belongs to val_kwargs"
        )
    if rollout.val_kwargs.temperature < 0:
        raise refuse("rollout.val_kwargs.temperature", "must be 0 (greedy) or above", rollout.val_kwargs.temperature, "use 0.0")
    for path, sampling in (("rollout", rollout), ("rollout.val_kwargs", rollout.val_kwargs)):
        if not 0 < sampling.top_p <= 1:
            raise refuse(f"{path}.top_p", "must be above 0 and at most 1", sampling.top_p, "use 1.0 for the whole vocabulary")
        if sampling.top_k != -1 and sampling.top_k < 1:
            raise refuse(f"{path}.top_k", "must be -1 (all tokens) or at least 1", sampling.top_k, "use -1")
    if rollout.repetition_penalty <= 0:
        raise refuse("rollout.repetition_penalty", "must be above 0", rollout.repetition_penalty, "use 1.0 for none")


def group_sizes_are_reachable(config: Config) -> None:
    n = config.rollout.n
    for path, value in (("replay.min_sessions", config.replay.min_sessions), ("algorithm.min_group_size", config.algorithm.min_group_size)):
        if value is not None and value > n:
            raise refuse(path, f"must be at most rollout.n ({n}), or no group would ever be complete", value, "lower it or raise rollout.n")


def leases_outlive_heartbeats(config: Config) -> None:
    replay = config.replay
    if replay.lease_s <= 2 * replay.heartbeat_s:
        raise refuse(
            "replay.lease_s",
            f"must be more than two heartbeats (replay.heartbeat_s is {replay.heartbeat_s:g} s), or living actors lose their leases",
            replay.lease_s,
            "raise lease_s",
        )


def segments_fit_the_store(config: Config) -> None:
    plane = config.dataplane
    writers = config.rollout.num_actors + config.learner.ranks
    if plane.segment_bytes * writers > plane.capacity_bytes:
        raise refuse(
            "dataplane.capacity_bytes",
            f"must hold one segment for each of the {writers} writers (rollout actors and learner ranks), {writers} x {plane.segment_bytes} bytes",
            plane.capacity_bytes,
            "raise it or lower segment_bytes",
        )


def update_is_sane(config: Config) -> None:
    actor = config.actor
    limits = [
        ("actor.clip_ratio", actor.clip_ratio, 0 < actor.clip_ratio < 1, "between 0 and 1"),
        ("actor.clip_ratio_low", actor.clip_ratio_low, actor.clip_ratio_low is None or 0 < actor.clip_ratio_low < 1, "null or between 0 and 1"),
        ("actor.clip_ratio_high", actor.clip_ratio_high, actor.clip_ratio_high is None or actor.clip_ratio_high > 0, "null or above 0"),
        ("weights.probe_tolerance", config.weights.probe_tolerance, (config.weights.probe_tolerance or 0) >= 0, "null, or 0 or above"),
        ("rollout.vllm.gpu_memory_utilization", config.rollout.vllm.gpu_memory_utilization, config.rollout.vllm.gpu_memory_utilization > 0, "above 0"),
        ("actor.entropy_coeff", actor.entropy_coeff, actor.entropy_coeff >= 0, "0 or above"),
        ("actor.clip_ratio_c", actor.clip_ratio_c, actor.clip_ratio_c > 1, "above 1"),
    ]
    for path, value, holds, rule in limits:
        if not holds:
            raise refuse(path, f"must be {rule}", value, "correct this value")


def processors_are_not_negative(config: Config) -> None:
    for path, value in (("rollout.num_gpus_per_actor", config.rollout.num_gpus_per_actor), ("learner.num_gpus_per_rank", config.learner.num_gpus_per_rank)):
        if value < 0:
            raise refuse(path, "must be 0 (no GPU) or above", value, "use 0 on a machine without a GPU")
        if value > 1 and value != int(value):
            raise refuse(path, "must be whole above 1: a GPU is shared by parts of one", value, f"use {int(value)} or {int(value) + 1}")


def hint_precisions_differ(config: Config) -> str | None:
    if config.rollout.dtype == config.learner.dtype:
        return None
    return f"rollout.dtype is {config.rollout.dtype} and learner.dtype is {config.learner.dtype}: their log-probs differ by rounding alone; use one for both"


def hint_without_effect(config: Config) -> str | None:
    data = config.data
    idle = [
        ("dataloader_num_workers", data.dataloader_num_workers > 0, "rows are read in the prompt actor, without workers"),
        ("filter_overlong_prompts_workers", data.filter_overlong_prompts_workers is not None and not data.filter_overlong_prompts, "the filter is off"),
    ]
    said = [f"data.{name} is without effect: {why}" for name, is_idle, why in idle if is_idle]
    return "; ".join(said) or None


def hint_lonely_filter(config: Config) -> str | None:
    if not config.algorithm.filter_groups.enable or config.rollout.n > 1:
        return None
    return "algorithm.filter_groups.enable is without effect: rollout.n is 1, and a group of one sample is never filtered; use rollout.n of 2 or more"


def hint_no_validation(config: Config) -> str | None:
    if config.data.val_files or config.trainer.test_freq == -1:
        return None
    return f"trainer.test_freq is {config.trainer.test_freq} but data.val_files is empty: nothing is validated; give a file or drop test_freq"


def hint_equal_answers(config: Config) -> str | None:
    val = config.rollout.val_kwargs
    if val.n == 1 or val.temperature > 0:
        return None
    return f"rollout.val_kwargs.n is {val.n} with rollout.val_kwargs.temperature 0: the {val.n} greedy answers to a row are the same; set a temperature"


def hint_names_for_no_tracker(config: Config) -> str | None:
    trainer, default = config.trainer, TrainerConfig()
    named = [key for key in ("project_name", "experiment_name") if getattr(trainer, key) != getattr(default, key)]
    if not named or "wandb" in trainer.logger:
        return None
    return f"{' and '.join(f'trainer.{key}' for key in named)} without effect: only wandb shows them, and trainer.logger does not have it; add it"


_RULES: tuple[Callable[[Config], None], ...] = (
    names_are_given,
    data_is_given,
    seeds_suit_every_generator,
    template_options_are_free,
    tool_files_have_one_path,
    sample_limit_fills_a_batch,
    batches_are_those_of_a_stream,
    mixtures_have_a_weight_per_file,
    one_version_per_step,
    frequencies_are_steps,
    resume_is_unambiguous,
    sampling_is_a_distribution,
    group_sizes_are_reachable,
    leases_outlive_heartbeats,
    segments_fit_the_store,
    *reward_checks.RULES,
    *algorithm_checks.RULES,
    *critic_checks.RULES,
    *learner_checks.RULES,
    *update_checks.RULES,
    update_is_sane,
    processors_are_not_negative,
)
_HINTS: tuple[Callable[[Config], str | None], ...] = (
    *reward_checks.HINTS,
    *algorithm_checks.HINTS,
    *critic_checks.HINTS,
    *learner_checks.HINTS,
    *update_checks.HINTS,
    hint_precisions_differ,
    hint_without_effect,
    hint_lonely_filter,
    hint_no_validation,
    hint_equal_answers,
    hint_names_for_no_tracker,
)

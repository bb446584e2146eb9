"""What a configuration amounts to, in text: sizes, groups in flight, optimizer steps, the objective, actors and what they ask of Ray.

Reads a resolved configuration only; opens no file and asks no machine.
"""

from __future__ import annotations

from streamrl.config.objective import objective
from streamrl.config.reward import scorers
from streamrl.config.run import Config

_ROW_BYTES_PER_TOKEN = 96  # upper estimate over all columns of a trajectory, prompt and answer alike


def plan(config: Config, num_rows: int | None = None) -> str:
    """The text of ``streamrl check``; ``num_rows`` of training data turns epochs into steps."""
    lines = [
        ("run", f"{config.run.folder or config.run.dir}, seed {config.run.seed}"),
        ("model", f"{config.model.path}{_adapters(config)}, engine {config.rollout.engine}, {config.rollout.dtype} rollout, {config.learner.dtype} learner"),
        ("steps", _steps(config, num_rows)),
        ("a step", _step(config)),
        ("in flight", _in_flight(config)),
        ("rewards", scorers(config.reward)),
        ("objective", objective(config)),
        ("actors", _actors(config)),
    ]
    return "\n".join(f"{name:<10} {text}" for name, text in lines)


def _adapters(config: Config) -> str:
    model = config.model
    return f" with LoRA of rank {model.lora_rank}, alpha {model.lora_alpha:g}, on {model.target_modules}" if model.lora_rank else ""


def _steps(config: Config, num_rows: int | None) -> str:
    per_step = config.data.train_batch_size // config.actor.ppo_mini_batch_size * config.actor.ppo_epochs
    updates = f"{per_step} optimizer step{'s' if per_step > 1 else ''} each"
    steps = config.trainer.total_training_steps
    if steps is None and num_rows is None:
        return f"{config.trainer.total_epochs} epochs of the data, {updates}"
    if steps is None:
        steps = (num_rows or 0) // config.data.train_batch_size * config.trainer.total_epochs
    return f"{steps} training steps, {updates}: {steps * per_step} in all, lr {config.actor.optim.lr:g} ({config.actor.optim.lr_scheduler_type})"


def _step(config: Config) -> str:
    prompts, n = config.data.train_batch_size, config.rollout.n
    tokens = prompts * n * (config.data.max_prompt_length + config.data.max_response_length)
    return f"{prompts} prompts x {n} samples = {prompts * n} trajectories, at most {tokens} tokens, mini-batches of {config.actor.ppo_mini_batch_size} prompts"


def _in_flight(config: Config) -> str:
    staleness = config.replay.max_staleness
    groups = (staleness + 1) * config.data.train_batch_size
    longest = config.data.max_prompt_length + config.data.max_response_length
    worst_mib = groups * config.rollout.n * longest * _ROW_BYTES_PER_TOKEN / 2**20
    mode = "synchronous" if staleness == 0 else f"asynchronous, at most {staleness} version{'s' if staleness > 1 else ''} stale"
    return f"at most {groups} groups, {mode}; rows of full length would take about {worst_mib:.0f} MiB of {config.dataplane.capacity_bytes / 2**20:.0f} MiB"


def _actors(config: Config) -> str:
    rollout, learner = config.rollout, config.learner
    rollouts = f"{rollout.num_actors} rollout ({_device(rollout.num_gpus_per_actor)} each, {rollout.max_sessions_per_actor} sessions)"
    return f"1 prompt, 1 replay, 1 store a node, {rollouts}, {learner.ranks} learner ({_device(learner.num_gpus_per_rank)} each)"


def _device(gpus: float) -> str:
    return f"{gpus:g} GPU" if gpus else "CPU"

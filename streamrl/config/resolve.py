"""Replaces every "None means ..." of a configuration by what it means, and makes its paths absolute, once, on the driver.

The result is what the run saves and what every actor receives, so a worker with another working directory finds the same files.
Resolving twice changes nothing.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from msgspec.structs import asdict, replace

from streamrl.config.batching import critic_batching
from streamrl.config.critic import CriticConfig
from streamrl.config.data import DEFAULT_CACHE_DIR, DataConfig
from streamrl.config.estimators import is_group_estimator
from streamrl.config.losses import agg_mode
from streamrl.config.objective import uses_critic, uses_reference
from streamrl.config.paths import resolve as absolute
from streamrl.config.paths import resolve_model, resolve_source
from streamrl.config.reward import RewardConfig
from streamrl.config.rollout import AgentConfig, DataplaneConfig, ModelConfig, ReplayConfig, RolloutConfig, default_agent_loop
from streamrl.config.run import Config, RunConfig, TrainerConfig
from streamrl.config.tools import one_of
from streamrl.config.training import PROBE_TOLERANCE_NATS, ActorConfig, AlgorithmConfig, RefConfig, WeightsConfig


def resolve(config: Config) -> Config:
    """The configuration with nothing left open. Draws ``run.seed`` and names ``run.folder`` when they are not given."""
    run = _run(config.run)
    config = _with_one_path_per_tool_file(config)
    return replace(
        config,
        run=run,
        model=_model(config.model),
        data=_data(config.data, run.seed),
        reward=_reward(config.reward),
        rollout=_rollout(config.rollout),
        dataplane=_dataplane(config.dataplane, run),
        replay=_replay(config.replay, config),
        algorithm=_algorithm(config.algorithm, config.rollout.n),
        actor=_actor(config.actor),
        critic=_critic(config),
        ref=_ref(config),
        weights=_weights(config.weights, config.rollout),
        trainer=_trainer(config.trainer),
    )


def _with_one_path_per_tool_file(config: Config) -> Config:
    """The same paths under both of their keys, whichever was given."""
    data, multi = config.data, config.rollout.multi_turn
    tools = one_of(data.tool_config_path, multi.tool_config_path, "tool_config_path")
    functions = one_of(data.function_tool_path, multi.function_tool_path, "function_tool_path")
    paths = {"tool_config_path": tools, "function_tool_path": functions}
    return replace(config, data=replace(data, **paths), rollout=replace(config.rollout, multi_turn=replace(multi, **paths)))


def _dataplane(dataplane: DataplaneConfig, run: RunConfig) -> DataplaneConfig:
    spill_dir = absolute(dataplane.spill_dir or f"{run.folder}/spill")
    return replace(dataplane, shm_dir=absolute(dataplane.shm_dir), spill_dir=spill_dir)


def _run(run: RunConfig) -> RunConfig:
    folder = Path(run.folder) if run.folder else Path(run.dir) / f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    seed = secrets.randbelow(2**31) if run.seed is None else run.seed
    return replace(run, seed=seed, dir=absolute(run.dir), folder=absolute(str(folder)))


def _model(model: ModelConfig) -> ModelConfig:
    path = resolve_model(model.path)
    return replace(model, path=path, tokenizer_path=resolve_model(model.tokenizer_path) if model.tokenizer_path else path)


def _data(data: DataConfig, seed: int | None) -> DataConfig:
    return replace(
        data,
        train_files=_files(data.train_files),
        val_files=_files(data.val_files),
        seed=seed if data.seed is None else data.seed,
        gen_batch_size=data.gen_batch_size or 1,
        cache_dir=absolute(data.cache_dir or DEFAULT_CACHE_DIR),
        custom_cls=replace(data.custom_cls, path=absolute(data.custom_cls.path)) if data.custom_cls else None,
    )


def _files(files: str | list[str]) -> list[str]:
    return [resolve_source(file) for file in ([files] if isinstance(files, str) else files)]


def _reward(reward: RewardConfig) -> RewardConfig:
    custom, judge, model = reward.custom_reward_function, reward.judge, reward.reward_model
    return replace(
        reward,
        custom_reward_function=replace(custom, path=absolute(custom.path)) if custom else None,
        judge=replace(judge, model_path=resolve_model(judge.model_path)) if judge else None,
        reward_model=replace(model, model_path=resolve_model(model.model_path)) if model.model_path else model,
    )


def _rollout(rollout: RolloutConfig) -> RolloutConfig:
    agent, multi = rollout.agent or AgentConfig(), rollout.multi_turn
    paths = {name: absolute(path) for name in ("interaction_config_path",) if (path := getattr(multi, name))}
    loops = absolute(agent.agent_loop_config_path) if agent.agent_loop_config_path else None
    agent = replace(agent, default_agent_loop=default_agent_loop(rollout), agent_loop_config_path=loops)
    return replace(rollout, agent=agent, multi_turn=replace(multi, **paths))


def _replay(replay: ReplayConfig, config: Config) -> ReplayConfig:
    saves = config.trainer.save_freq > 0
    return replace(
        replay,
        min_sessions=replay.min_sessions or min(2, config.rollout.n),
        retain=replay.retain or ("checkpoint" if saves else "published"),
        retain_bytes=replay.retain_bytes or config.dataplane.capacity_bytes // 4,
    )


def _algorithm(algorithm: AlgorithmConfig, n: int) -> AlgorithmConfig:
    least = min(2, n) if is_group_estimator(algorithm.adv_estimator) else 1
    return replace(algorithm, min_group_size=algorithm.min_group_size or least)


def _actor(actor: ActorConfig) -> ActorConfig:
    low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    return replace(actor, clip_ratio_low=low, clip_ratio_high=high, loss_agg_mode=agg_mode(actor))


def _critic(config: Config) -> CriticConfig:
    """Without a critic all else stays as it was given, so that the checks can refuse it."""
    if not uses_critic(config):
        return replace(config.critic, enable=False)
    sizes = {name: value for name, value in asdict(critic_batching(config.critic, config.actor)).items() if name in CriticConfig.__struct_fields__}
    return replace(config.critic, enable=True, path=resolve_model(config.critic.path or config.model.path), **sizes)


def _ref(config: Config) -> RefConfig:
    """Without a KL it stays as it was given: there is no reference, and the model may move later."""
    path = config.ref.path or (config.model.path if uses_reference(config.algorithm, config.actor) else None)
    return replace(config.ref, path=resolve_model(path) if path else None)


def _weights(weights: WeightsConfig, rollout: RolloutConfig) -> WeightsConfig:
    tolerance = PROBE_TOLERANCE_NATS[rollout.dtype] if weights.probe_tolerance is None else weights.probe_tolerance
    return replace(weights, probe_tolerance=tolerance, max_unavailable=weights.max_unavailable or max(1, rollout.num_actors // 2))


def _trainer(trainer: TrainerConfig) -> TrainerConfig:
    return replace(trainer, resume_from_path=absolute(trainer.resume_from_path) if trainer.resume_from_path else None)

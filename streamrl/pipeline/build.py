"""Builds each part from the configuration, for both runners: one process (``local.py``) and Ray actors.

A part receives its own sections and nothing more. Heavy imports happen inside the builder that needs them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from streamrl.config import Config
from streamrl.config.estimators import is_group_estimator
from streamrl.config.load import dump
from streamrl.config.objective import needed_columns, uses_critic
from streamrl.dataplane import StoreIndex, has_journal
from streamrl.dataplane.sweep import PREFIX
from streamrl.errors import DataError
from streamrl.pipeline.checkpoints import Checkpoints
from streamrl.pipeline.loops import GroupWorker, LeaseGate
from streamrl.pipeline.spending import Metered
from streamrl.pipeline.validation import Validator
from streamrl.protocol.interfaces import Engine, LeaseSource, PromptSource, SessionRunner, TrajectoryStore
from streamrl.protocol.waits import WaitTable
from streamrl.replay import BufferSpec, JournalledBuffer, ReplayService
from streamrl.replay.outcome import min_good_sessions
from streamrl.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from streamrl.dataplane import Store
    from streamrl.learner.rank import LearnerRank
    from streamrl.rewards import RewardManager
    from streamrl.rewards.judge import JudgeScorer


def run_seed(config: Config) -> int:
    """The resolved seed; ``config.load.resolve`` draws one when none is given."""
    assert config.run.seed is not None, "the launcher resolves run.seed"
    return config.run.seed


def threads_of(configured: int, processes: int) -> int:
    """Torch threads of one process: as configured, or the machine's cores shared out evenly."""
    return configured or max(1, (os.cpu_count() or 1) // max(1, processes))


def weights_dir(config: Config, run_id: str, mark: str = "") -> Path:
    """Where snapshots of the run lie: node-local shared memory, swept with the run's segments. ``mark``: of a node other than the driver's."""
    return Path(config.dataplane.shm_dir) / f"{PREFIX}{run_id}-weights{mark}"


def build_prompts(config: Config) -> PromptSource:
    from streamrl.data import PromptStream
    from streamrl.rollout import load_tokenizer

    tokenizer = load_tokenizer(config.model) if config.data.filter_overlong_prompts or config.data.custom_cls else None
    epochs = None if config.trainer.total_training_steps else config.trainer.total_epochs
    return PromptStream(config.data, run_seed=run_seed(config), total_epochs=epochs, tokenizer=tokenizer)


def build_index(config: Config, run_id: str, owner_pid: int, ledger: Path, life: str = "") -> StoreIndex:
    """The store's index, as its journal in ``ledger`` has it if there is one: then over the segments of its former life."""
    if has_journal(ledger):
        return StoreIndex.recover(ledger, config.dataplane, owner_pid, life)
    return StoreIndex(Path(config.dataplane.shm_dir), run_id, config.dataplane, owner_pid, ledger, life)


def build_replay(config: Config, store: Store, ledger: Path) -> ReplayService:
    """The replay buffer where its journal in ``ledger`` ends, or an empty one."""
    spec = BufferSpec(
        config.replay,
        groups_per_step=config.data.train_batch_size,
        n=config.rollout.n,
        group_estimator=is_group_estimator(config.algorithm.adv_estimator),
        filter_groups=config.algorithm.filter_groups,
    )

    async def missing(keys: list[str]) -> list[str]:
        held = (await store.async_kv_list("train")).get("train", {})
        return [key for key in keys if key not in held]

    return ReplayService(JournalledBuffer.open(ledger, spec), clear=store.clear, missing=missing, spill=store.spill)


def build_engine(config: Config, name: str) -> Engine:
    from streamrl import engines

    return engines.create(
        config.model,
        config.rollout,
        name=name,
        max_model_len=config.data.max_prompt_length + config.data.max_response_length,
        seed=run_seed(config),
        threads=threads_of(config.rollout.num_threads, config.rollout.num_actors + config.learner.ranks),
    )


def build_rewards(config: Config) -> RewardManager:
    """The rewards of one rollout process."""
    from streamrl import rewards
    from streamrl.rollout import load_tokenizer

    return rewards.build(
        config.reward,
        config.data,
        tokenizer=load_tokenizer(config.model),
        judge=build_judge(config),
        components=config.algorithm.gdpo_reward_keys or (),
        num_actors=config.rollout.num_actors,
    )


def build_judge(config: Config) -> JudgeScorer | None:
    """The judge with an engine of its own, not started yet; its threads are those of the rollout actor."""
    judge = config.reward.judge
    if judge is None:
        return None
    from streamrl import engines
    from streamrl.config.rollout import ModelConfig
    from streamrl.rewards.judge import JudgeScorer
    from streamrl.rollout import load_tokenizer

    model = ModelConfig(path=judge.model_path, trust_remote_code=judge.trust_remote_code)
    rollout = replace(
        config.rollout,
        engine=judge.engine,
        dtype=judge.dtype,
        vllm=judge.vllm,
        transformers=judge.transformers,
        max_sessions_per_actor=judge.max_concurrency,
    )
    engine = engines.create(
        model,
        rollout,
        name="judge",
        max_model_len=judge.prompt_length + judge.response_length,
        seed=run_seed(config),
        threads=threads_of(config.rollout.num_threads, config.rollout.num_actors + config.learner.ranks),
    )
    return JudgeScorer(judge, engine, load_tokenizer(model, "reward.judge.model_path"), timeout_s=config.reward.timeout_s)


def build_runner(config: Config, engine: Engine, metrics: Metrics | None = None) -> SessionRunner:
    from streamrl.rollout import GroupSessionRunner, load_tokenizer
    from streamrl.rollout.chat import vocab_size

    return GroupSessionRunner(
        rollout=config.rollout,
        data=config.data,
        tokenizer=load_tokenizer(config.model),
        generate=engine.generate if metrics is None else Metered(engine.generate, metrics),
        scorer=build_rewards(config),
        run_seed=run_seed(config),
        greedy_baseline="reward_baselines" in needed_columns(config.algorithm.adv_estimator),
        turn_level=config.reward.turn_level,
        vocab_size=vocab_size(config.model),
        metrics=metrics,
    )


def build_worker(
    config: Config,
    name: str,
    *,
    replay: LeaseSource,
    store: TrajectoryStore,
    runner: SessionRunner,
    engine: Engine,
    waits: WaitTable,
    metrics: Metrics,
    node: str | None = None,
    gate: LeaseGate | None = None,
) -> GroupWorker:
    def check() -> None:
        engine.check()
        runner.check()

    return GroupWorker(
        name,
        replay=replay,
        store=store,
        runner=runner,
        slots=config.rollout.max_sessions_per_actor,
        session_retries=config.rollout.session_retries,
        check_engine=check,
        waits=waits,
        metrics=metrics,
        node=node,
        gate=gate,
        min_sessions=min_good_sessions(config.rollout.n, config.replay.min_sessions, is_group_estimator(config.algorithm.adv_estimator)),
        lease_limit_s=config.replay.take_timeout_s,
        session_limit_s=config.rollout.timeouts.session_s,
        put_limit_s=config.dataplane.put_timeout_s,
    )


def build_rank(config: Config, store: Store, weights_dir: Path, samples_dir: Path, rank: int, metrics: Metrics | None = None) -> LearnerRank:
    import torch

    from streamrl.learner.rank import LearnerRank
    from streamrl.telemetry.samples import SampleWriter

    torch.set_num_threads(threads_of(config.learner.num_threads, config.rollout.num_actors + config.learner.ranks))
    return LearnerRank(
        model=config.model,
        actor=config.actor,
        algorithm=config.algorithm,
        critic=config.critic if uses_critic(config) else None,
        ref=config.ref,
        reward=config.reward,
        data=config.data,
        learner=config.learner,
        weights=config.weights,
        rollout_dtype=config.rollout.dtype,
        temperature=config.rollout.temperature,
        seed=run_seed(config),
        store=store,
        weights_dir=weights_dir,
        rank=rank,
        ranks=config.learner.ranks,
        loss_scale_factor=float(config.data.max_response_length),
        samples=SampleWriter(samples_dir, groups=config.telemetry.sample_groups, keep=config.telemetry.sample_steps),
        metrics=metrics,
    )


def build_checkpoints(config: Config, root: Path, prompts: PromptSource, resume: Path | None) -> Checkpoints:
    return Checkpoints(root, config.trainer, prompts, resume, saved_config=dump(config))


def build_validator(config: Config, prompts: PromptSource, waits: WaitTable) -> Validator:
    return Validator(prompts, waits, limit_s=config.rollout.timeouts.session_s, samples=config.rollout.val_kwargs.n, source_key=config.data.reward_fn_key)


def total_steps(config: Config, num_prompts: int) -> int:
    """Steps of the run: as configured, or epochs of ``num_prompts // train_batch_size`` steps."""
    steps = config.trainer.total_training_steps or config.trainer.total_epochs * (num_prompts // config.data.train_batch_size)
    if not steps:
        batch = config.data.train_batch_size
        raise DataError(f"an epoch fills at least one step, got {num_prompts} prompts, filters applied, for data.train_batch_size={batch}; lower it")
    return steps

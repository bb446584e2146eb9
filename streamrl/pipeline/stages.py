"""The stages of a step, in order, over keys and tags: each reads columns of the store and writes others.

    [reward model] ► balance ► old log-probs ► [reference log-probs] ► [values] ► advantages        ``Stages.judge``
    [the critic's update] ► the policy's update, but in the first ``trainer.critic_warmup`` steps     ``Stages.learn``

Guarantees: a stage whose input neither the rollout nor a stage before it writes is refused when the trainer is made, and a row without a reward before
its batch is touched. An update is asked for once, also by a trainer that goes on where another stood. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from streamrl.config import Config
from streamrl.config.batching import Batching, critic_batching
from streamrl.config.objective import makes_weights, needed_columns, reads_rollout_log_probs, uses_critic, uses_reference
from streamrl.errors import ConfigError, ProtocolError
from streamrl.learner.plan import Dealing, length_metrics, plan_shares, plan_update
from streamrl.learner.reward_plan import plan_rewards
from streamrl.protocol.interfaces import LearnerGroup
from streamrl.protocol.learn import StageReport, StepUpdates, UpdateWork
from streamrl.protocol.meta import KVBatchMeta

T = TypeVar("T")


class Call(Protocol):
    """Waits for a learner stage under its deadline, by name."""

    async def __call__(self, call: Awaitable[T], what: str, state: str, /) -> T: ...


@dataclass(frozen=True)
class Stage:
    """One stage; ``run`` takes the batch and its shares, one for each rank. None: an update, which ``Stages.learn`` runs."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    run: Callable[[LearnerGroup, KVBatchMeta, list[KVBatchMeta]], Awaitable[StageReport]] | None = None


def stages_of(config: Config) -> list[Stage]:
    """Those that this configuration runs, in order, but for the reward model: which rows it judges is seen batch by batch."""
    needs, policy = needed_columns(config.algorithm.adv_estimator), ("input_ids", "response_mask")
    stages = []
    if config.algorithm.rollout_correction.bypass_mode:
        copied = ("response_mask", "rollout_log_probs")
        stages.append(Stage("old log-probs", copied, ("old_log_probs",), lambda learner, batch, shares: learner.log_probs(shares)))
    else:
        made = ("old_log_probs", "entropy", *(["sum_pi_squared"] if "sum_pi_squared" in needs else []))
        stages.append(Stage("old log-probs", policy, made, lambda learner, batch, shares: learner.log_probs(shares)))
    if uses_reference(config.algorithm, config.actor):
        stages.append(Stage("reference log-probs", policy, ("ref_log_prob",), lambda learner, batch, shares: learner.ref_log_probs(shares)))
    if uses_critic(config):
        stages.append(Stage("values", policy, ("values",), lambda learner, batch, shares: learner.values(shares)))
    stages.append(Stage("advantages", _judged(config, needs), _judgement(config), lambda learner, batch, shares: learner.advantages(batch)))
    if uses_critic(config):
        stages.append(Stage("the critic's update", ("input_ids", "loss_mask", "values", "returns"), ()))
    compared = [*(["ref_log_prob"] if config.actor.use_kl_loss else []), *(["rollout_is_weights"] if makes_weights(config.algorithm) else [])]
    stages.append(Stage("the policy's update", ("input_ids", "loss_mask", "old_log_probs", "advantages", *compared), ()))
    return stages


def _judged(config: Config, needs: tuple[str, ...]) -> tuple[str, ...]:
    algorithm = config.algorithm
    penalty = ["ref_log_prob"] if algorithm.use_kl_in_reward else []
    return ("response_mask", "rm_scores", "old_log_probs", *needs, *penalty, *(["rollout_log_probs"] if reads_rollout_log_probs(algorithm) else []))


def _judgement(config: Config) -> tuple[str, ...]:
    weights = ["rollout_is_weights"] if makes_weights(config.algorithm) else []
    return ("token_level_scores", "token_level_rewards", "advantages", "returns", "loss_mask", "session_weight", *weights)


def rollout_columns(config: Config) -> set[str]:
    """What the rows of a batch come with, or get from the reward model."""
    made = {"input_ids", "response_mask", "loss_mask", "rollout_versions", "rm_scores", "reward_extra_info"}
    made |= {"rollout_log_probs"} if config.rollout.calculate_log_probs else set()
    return made | ({"reward_baselines"} & set(needed_columns(config.algorithm.adv_estimator)))


def check_columns(stages: list[Stage], made: set[str]) -> None:
    """ConfigError when a stage would read a column that nothing has written by then."""
    made = set(made)
    for stage in stages:
        if missing := sorted(set(stage.reads) - made):
            raise ConfigError(f"a stage reads columns that a stage before it writes, got none for {', '.join(missing)} of {stage.name}; see `streamrl check`")
        made |= set(stage.writes)


class Stages:
    """Runs the stages of one batch after another on ``learner``; every wait goes through ``call``."""

    def __init__(self, config: Config, learner: LearnerGroup, call: Call, total_steps: int) -> None:
        self._config = config
        self.learner = learner
        self._call = call
        self._total_steps = total_steps
        shared = config.learner.shared_prompts and config.model.use_remove_padding is not False
        self._dealing = Dealing(config.trainer.balance_batch, shared, config.learner.workload_linear)
        self._stages = stages_of(config)
        check_columns(self._stages, rollout_columns(config))

    async def judge(self, batch: KVBatchMeta) -> StageReport:
        """All columns that the updates read; metrics of all stages, and what the advantage stage rejected."""
        report = await self._reward(batch)
        shares = plan_shares(batch, self.learner.ranks, self._config.actor, self._dealing)
        report.metrics |= length_metrics(batch, shares)
        for stage in self._stages:
            if stage.run is not None:
                done = await self._call(stage.run(self.learner, batch, shares), stage.name, "wait_learner")
                report = StageReport(report.metrics | done.metrics, report.rejected + done.rejected)
        return report

    async def _reward(self, batch: KVBatchMeta) -> StageReport:
        """Of rows that came without one."""
        shares = plan_rewards(batch, self.learner.ranks)
        if not shares:
            return StageReport()
        if not self._config.reward.reward_model.enable:
            keys = [key for share in shares for key in share.keys]
            raise ProtocolError(f"a row has a reward when it is trained, got none for {len(keys)} rows such as {keys[:3]}; set reward.reward_model.enable=true")
        return await self._call(self.learner.rm_scores(shares), "reward model scores", "wait_learner")

    async def learn(self, batch: KVBatchMeta, global_step: int, done: StepUpdates | None = None) -> StepUpdates:
        """Each update of the step that is not ``done``."""
        updates = done or StepUpdates(global_step)
        config, learner = self._config, self.learner
        if uses_critic(config) and updates.critic is None:
            works = self._plan(batch, critic_batching(config.critic, config.actor), global_step)
            updates.critic = await self._call(learner.update_critic(works), "the critic's update", "wait_learner")
        if global_step > config.trainer.critic_warmup and updates.actor is None:
            works = self._plan(batch, config.actor, global_step)
            updates.actor = await self._call(learner.update(works), "the policy's update", "wait_learner")
        return updates

    def _plan(self, batch: KVBatchMeta, batching: Batching, global_step: int) -> list[UpdateWork]:
        return plan_update(batch, self.learner.ranks, batching, self._dealing, global_step=global_step, total_steps=self._total_steps)

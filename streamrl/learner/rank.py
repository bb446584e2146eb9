"""One learner rank: reads rows from the store, scores, judges and learns them, writes columns back, and hands weights out.

Implements ``streamrl.protocol.interfaces.Learner``. Guarantees: every call but ``advantages`` is a collective that all ranks make in the
same order with the same number of passes, whatever their shares; reports are reduced, so that each rank returns the same. Knows nothing of
groups' life cycle, staleness or who calls it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from streamrl.algorithms import advantages
from streamrl.algorithms.kl_control import kl_controller
from streamrl.config.batching import critic_batching
from streamrl.config.critic import CriticConfig
from streamrl.config.data import DataConfig
from streamrl.config.objective import needed_columns, uses_reference
from streamrl.config.reward import RewardConfig
from streamrl.config.rollout import ModelConfig
from streamrl.config.training import ActorConfig, AlgorithmConfig, LearnerConfig, RefConfig, WeightsConfig
from streamrl.errors import ConfigError, RunFailed
from streamrl.learner import lora
from streamrl.learner.batch_columns import Columns, copy_log_probs, get, read_batch, read_envs, read_sessions
from streamrl.learner.checkpoint import Checkpointer
from streamrl.learner.comm import Comm, Rendezvous
from streamrl.learner.critic import Critic, CriticLesson, value_rows
from streamrl.learner.engine import PolicyEngine
from streamrl.learner.judge import judge
from streamrl.learner.judge_metrics import session_metrics, tag_metrics
from streamrl.learner.loading import open_policy
from streamrl.learner.memory import memory_metrics
from streamrl.learner.metering import meter_envs, meter_token_lags
from streamrl.learner.objective import Objective
from streamrl.learner.policy_update import PolicyLesson
from streamrl.learner.publish import VersionWriter, make_probe
from streamrl.learner.reference import open_reference
from streamrl.learner.reward_model import RewardModel
from streamrl.learner.rows import Rows
from streamrl.learner.scoring import Scorer, score_rows, score_tokens
from streamrl.learner.sharding import choose_device
from streamrl.learner.update import Update
from streamrl.protocol.learn import StageReport, StepUpdates, UpdateReport, UpdateWork
from streamrl.protocol.meta import KVBatchMeta
from streamrl.protocol.weights import Probe, WeightManifest
from streamrl.telemetry.metrics import Metrics, NullMetrics
from streamrl.telemetry.phases import Phases
from streamrl.telemetry.samples import SampleWriter


class LearnerRank:
    """Rank ``rank`` of ``ranks``. Usable after ``start``."""

    def __init__(
        self,
        *,
        model: ModelConfig,
        actor: ActorConfig,
        algorithm: AlgorithmConfig,
        learner: LearnerConfig,
        weights: WeightsConfig,
        ref: RefConfig,
        rollout_dtype: str,
        temperature: float,
        seed: int,
        store: Columns,
        weights_dir: Path,
        rank: int,
        ranks: int,
        critic: CriticConfig | None = None,  # None: no critic
        reward: RewardConfig = RewardConfig(),
        data: DataConfig | None = None,  # for a reward model
        loss_scale_factor: float | None = None,  # seq-mean-token-sum-norm: data.max_response_length
        samples: SampleWriter | None = None,  # None: no step leaves a sample
        metrics: Metrics | None = None,
    ) -> None:
        if temperature <= 0:
            raise ConfigError(f"$.rollout.temperature: training needs the sampled distribution, got {temperature}; set it above 0 (greedy is for validation)")
        for name, section in (("actor", actor), ("critic", critic)):
            if section is not None and section.loss_agg_mode == "seq-mean-token-sum-norm" and loss_scale_factor is None:
                raise ConfigError(f"$.{name}.loss_agg_mode: seq-mean-token-sum-norm divides by a constant, got none; pass data.max_response_length")
        self._model, self._actor, self._algorithm, self._learner, self._weights = model, actor, algorithm, learner, weights
        self._rollout_dtype, self._temperature, self._seed = getattr(torch, rollout_dtype), temperature, seed
        self._store, self._weights_dir = store, Path(weights_dir)
        self._critic_config, self._reward, self._data, self._scale = critic, reward, data, loss_scale_factor
        self.rank, self.ranks = rank, ranks
        self._samples = samples
        self._metrics = metrics or NullMetrics()
        self._phases = Phases(self._metrics)
        self._rendezvous: Rendezvous | None = None
        self._objective = Objective(actor, algorithm, loss_scale_factor)  # an unknown loss or estimator of user code fails here, before the model is loaded
        advantages.get(algorithm.adv_estimator)
        self._ref, self._controller = ref, kl_controller(algorithm.kl_ctrl)
        self._engine: PolicyEngine | None = None
        self._versions: VersionWriter | None = None
        self._checkpointer: Checkpointer | None = None
        self._reference: Scorer | None = None
        self._critic: Critic | None = None
        self._reward_model: RewardModel | None = None
        self.updates: dict[str, Update] = {}  # of "actor" and, when there is one, "critic"
        self._last: StepUpdates | None = None

    def open_rendezvous(self, host: str) -> str:
        """Rank 0: the "host:port" at which all ranks meet; pass it to every rank's ``start``."""
        self._rendezvous = Rendezvous(host, self.ranks)
        return self._rendezvous.address

    def start(self, rendezvous: str) -> None:
        """Meet the other ranks, load the model and shard it."""
        random.seed(self._seed + self.rank)
        np.random.seed((self._seed + self.rank) % 2**32)
        torch.manual_seed(self._seed + self.rank)
        device = choose_device(self._learner)
        comm = Comm.join(self.rank, self.ranks, device, rendezvous=rendezvous, held=self._rendezvous, timeout_s=self._learner.step_timeout_s)
        pretrained = open_policy(self._model)
        lora.attach(pretrained.model, self._model, self._seed, getattr(torch, self._learner.dtype))
        self._engine = PolicyEngine(pretrained, self._actor, self._learner, comm, self._temperature)
        self._versions = VersionWriter(self._engine, self._weights_dir, self._rollout_dtype)
        self._checkpointer = Checkpointer(comm, self._actor.checkpoint, self._model, self._rollout_dtype, self._learner.step_timeout_s)
        if self.has_reference:
            self._reference = open_reference(self._engine, self._model, self._ref, self._learner, self._temperature)
        skips = self._learner.max_consecutive_skips
        lesson = PolicyLesson(self._engine, self._actor, self._objective, seed=self._seed, has_one_update=self._has_one_update)
        self.updates["actor"] = Update(self._engine, lesson, max_consecutive_skips=skips, phases=self._phases)
        if self._critic_config is not None:
            batching = critic_batching(self._critic_config, self._actor)
            self._critic = Critic(open_policy(self._model, self._critic_config.path, "critic.path"), self._critic_config, self._learner, comm)
            taught = CriticLesson(self._critic, self._critic_config, batching, self._scale)
            self.updates["critic"] = Update(self._critic, taught, max_consecutive_skips=skips, phases=self._phases)
        if self._reward.reward_model.enable:
            assert self._data is not None
            self._reward_model = RewardModel(self._reward, data=self._data, policy=self._model, learner=self._learner, comm=comm)

    def stop(self) -> None:
        """Leave the group. Idempotent."""
        if self._engine is not None:
            self._engine.comm.leave()
        self._engine = self._versions = self._checkpointer = self._reference = self._critic = self._reward_model = self._rendezvous = None
        self.updates = {}

    @property
    def engine(self) -> PolicyEngine:
        if self._engine is None:
            raise RunFailed(f"a learner rank is used after start, got a call on rank {self.rank} before it; call start(rendezvous)")
        return self._engine

    @property
    def checkpointer(self) -> Checkpointer:
        assert self.engine is not None and self._checkpointer is not None
        return self._checkpointer

    @property
    def _has_one_update(self) -> bool:
        """Whether the whole batch is one optimizer step of the policy."""
        return self._data is not None and self._actor.ppo_epochs == 1 and self._data.train_batch_size <= self._actor.ppo_mini_batch_size

    @property
    def has_reference(self) -> bool:
        """Whether a KL compares the policy with the reference."""
        return uses_reference(self._algorithm, self._actor)

    def rm_scores(self, share: KVBatchMeta) -> StageReport:
        """Writes ``rm_scores`` and ``reward_extra_info`` of rows that came without a reward."""
        if self._reward_model is None:
            raise RunFailed("rows come with a reward where there is no reward model, got some without; set reward.reward_model.enable=true")
        with self._phases("logprobs"):
            return self._reward_model.score(self._store, share)

    def log_probs(self, share: KVBatchMeta) -> StageReport:
        """Writes ``old_log_probs`` and ``entropy`` of the share's rows, under the weights as they are now; in bypass mode the engine's log-probs."""
        if self._algorithm.rollout_correction.bypass_mode:
            with self._phases("fetch"):
                copy_log_probs(self._store, share)
            return StageReport()
        rows = self._rows(share, ["response_mask"])
        with self._phases("logprobs"):
            squares = "sum_pi_squared" in needed_columns(self._algorithm.adv_estimator)
            columns, report = score_rows(self.engine, rows, self._actor, with_squares=squares, keep=self._has_one_update)
        self._put(share, columns)
        return report

    def ref_log_probs(self, share: KVBatchMeta) -> StageReport:
        """Writes ``ref_log_prob`` of the share's rows, under the frozen reference."""
        if self._reference is None:
            raise RunFailed("a reference is loaded when a KL needs one, got a call without a KL; set algorithm.use_kl_in_reward or actor.use_kl_loss")
        rows = self._rows(share, ["response_mask"])
        with self._phases("logprobs"):
            scored = score_tokens(self._reference, rows, self._actor, list(range(len(rows))))
        self._put(share, {"ref_log_prob": scored["log_probs"]})
        return StageReport()

    def values(self, share: KVBatchMeta) -> StageReport:
        """Writes ``values`` of the share's rows, by the critic as it is now."""
        if self._critic is None:
            raise RunFailed("a critic is made when the estimator reads values, got a call without one; set critic.enable=true")
        rows = self._rows(share, ["response_mask"])
        with self._phases("logprobs"):
            values = value_rows(self._critic, rows, self.updates["critic"].lesson.batching)
        self._put(share, values)
        return StageReport()

    def advantages(self, batch: KVBatchMeta) -> StageReport:
        """Rank 0, whole groups: writes the columns that the update reads. Runs on the CPU, no collective."""
        with self._phases("fetch"):
            read = read_batch(self._store, batch, self._algorithm, with_values=self._critic is not None)
            envs = read_envs(self._store, batch)
        with self._phases("advantages"):
            judged = judge(
                batch.keys,
                read.response_mask,
                read.rm_scores,
                read.old_log_probs,
                read.rollout_log_probs,
                self._algorithm,
                columns=read.further,
                controller=self._controller if self._algorithm.use_kl_in_reward else None,
                lags=read.lags,
                envs=envs,
            )
        meter_envs(self._metrics, judged.by_env)
        names = ("token_level_scores", "token_level_rewards", "advantages", "returns", "loss_mask", "rollout_is_weights")
        written: dict[str, Any] = {name: read.unpadded(value) for name in names if (value := getattr(judged, name)) is not None}
        self._put(batch, written | {"session_weight": judged.session_weight.float()})
        if self._samples is not None:
            self._samples.write(batch, self._store.kv_batch_get_by_meta)
        judged.report.metrics.update(tag_metrics(batch) | session_metrics(*read_sessions(self._store, batch)))
        return judged.report

    def update(self, work: UpdateWork) -> UpdateReport:
        """Of the policy: one optimizer step per mini-batch; the same report on every rank."""
        report = self._run(self.updates["actor"], work)
        self._of_step(work.global_step).actor = report
        return report

    def update_critic(self, work: UpdateWork) -> UpdateReport:
        """The same for the critic."""
        report = self._run(self.updates["critic"], work)
        self._of_step(work.global_step).critic = report
        return report

    def last_updates(self) -> StepUpdates | None:
        """What this process finished of the newest step."""
        return self._last

    def _run(self, update: Update, work: UpdateWork) -> UpdateReport:
        weighted = ["session_weight"] if update.lesson.counts_sessions else []
        report = update.run(self._rows(work.meta, update.lesson.fields, weighted), work)
        if update is self.updates["actor"] and report.applied:
            with self._phases("fetch"):
                meter_token_lags(self._metrics, self._store, work.meta)
        report.metrics |= memory_metrics(update.model.comm)
        return report

    def _of_step(self, global_step: int) -> StepUpdates:
        if self._last is None or self._last.global_step != global_step:
            self._phases.end_of_step()  # of one that made no version
            self._last = StepUpdates(global_step)
        return self._last

    def snapshot(self, version: int) -> WeightManifest | None:
        """Write the current weights as ``version``, in the dtype the engines run in."""
        assert self.engine is not None and self._versions is not None
        with self._phases("publish"):
            manifest = self._versions.write(version, self.probe())
        self._phases.end_of_step()
        self._metrics.set("streamrl_weight_version", version)
        return manifest

    def probe(self) -> Probe | None:
        """A fixed row and its log-probs under the current weights; None when the configuration has it off."""
        if not self._weights.probe:
            return None
        coarse = torch.bfloat16 in (self._rollout_dtype, getattr(torch, self._learner.dtype))
        tolerance = self._weights.probe_tolerance or (0.5 if coarse else 0.005)
        return make_probe(self.engine, self._seed, tolerance)

    def stage(self) -> None:
        """Keep what ``save`` shall write, as it is now."""
        self.updates["actor"].progress.kl_coef = self._controller.beta  # rank 0's counts: it alone moves the controller and writes the progress
        with self._phases.alone("checkpoint"):
            self.checkpointer.stage(self.updates)

    def save(self, folder: str) -> None:
        """Write what was staged; may run beside any other call."""
        with self._phases.alone("checkpoint"):
            self.checkpointer.write(Path(folder))

    def load(self, folder: str) -> None:
        """Weights, optimizer, schedule and KL coefficient. The reference stays the model that the run began with."""
        self.checkpointer.load(self.updates, Path(folder))
        kl_coef = self.updates["actor"].progress.kl_coef
        if kl_coef is not None and self._algorithm.kl_ctrl.type == "adaptive":
            self._controller.beta = kl_coef

    def _rows(self, meta: KVBatchMeta, fields: Sequence[str], scalars: Sequence[str] = ()) -> Rows:
        if not len(meta):
            return Rows.none(fields)
        return Rows.of(meta.keys, self._get(meta, ["input_ids", *fields, *scalars]), fields)

    def _get(self, meta: KVBatchMeta, fields: list[str]) -> TensorDict:
        with self._phases("fetch"):
            return get(self._store, meta, fields)

    def _put(self, meta: KVBatchMeta, columns: dict[str, Any]) -> None:
        if len(meta):
            with self._phases("fetch"):
                self._store.kv_batch_put_by_meta(meta, columns)

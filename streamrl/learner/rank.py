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
from streamrl.config.objective import needed_columns, uses_reference
from streamrl.config.rollout import ModelConfig
from streamrl.config.training import ActorConfig, AlgorithmConfig, LearnerConfig, RefConfig, WeightsConfig
from streamrl.errors import ConfigError, MissingField, RunFailed
from streamrl.learner import checkpoint
from streamrl.learner.batch_columns import Columns, get, missing_log_probs, read_batch, read_sessions
from streamrl.learner.comm import Comm, Rendezvous
from streamrl.learner.engine import PolicyEngine, choose_device, load_policy
from streamrl.learner.judge import check_finite, judge
from streamrl.learner.judge_metrics import session_metrics, tag_metrics
from streamrl.learner.objective import Objective, counts_sessions
from streamrl.learner.publish import make_probe, write_version
from streamrl.learner.reference import ReferencePolicy
from streamrl.learner.rows import Column, Rows
from streamrl.learner.scoring import score_rows, score_tokens
from streamrl.learner.update import PolicyUpdate
from streamrl.protocol.learn import LastUpdate, StageReport, UpdateReport, UpdateWork
from streamrl.protocol.meta import KVBatchMeta
from streamrl.protocol.weights import Probe, WeightManifest
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
        loss_scale_factor: float | None = None,  # seq-mean-token-sum-norm: data.max_response_length
        samples: SampleWriter | None = None,  # None: no step leaves a sample
    ) -> None:
        if temperature <= 0:
            raise ConfigError(f"$.rollout.temperature: training needs the sampled distribution, got {temperature}; set it above 0 (greedy is for validation)")
        if actor.loss_agg_mode == "seq-mean-token-sum-norm" and loss_scale_factor is None:
            raise ConfigError("$.actor.loss_agg_mode: seq-mean-token-sum-norm divides by a constant, got none; pass data.max_response_length")
        self._model, self._actor, self._algorithm, self._learner, self._weights = model, actor, algorithm, learner, weights
        self._rollout_dtype, self._temperature, self._seed = getattr(torch, rollout_dtype), temperature, seed
        self._store, self._weights_dir = store, Path(weights_dir)
        self.rank, self.ranks = rank, ranks
        self._samples = samples
        self._rendezvous: Rendezvous | None = None
        self._objective = Objective(actor, algorithm, loss_scale_factor)  # an unknown loss or estimator of user code fails here, before the model is loaded
        advantages.get(algorithm.adv_estimator)
        self._ref, self._controller = ref, kl_controller(algorithm.kl_ctrl)
        self._engine: PolicyEngine | None = None
        self._reference: ReferencePolicy | None = None
        self._update: PolicyUpdate | None = None
        self._last: LastUpdate | None = None

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
        self._engine = PolicyEngine(load_policy(self._model), self._actor, self._learner, comm, self._temperature)
        if self.has_reference:
            model = load_policy(self._model, self._ref.path, "ref.path")
            self._reference = ReferencePolicy(model, self._learner, comm, self._temperature)
        skips = self._learner.max_consecutive_skips
        self._update = PolicyUpdate(self._engine, self._actor, self._objective, seed=self._seed, max_consecutive_skips=skips)

    def stop(self) -> None:
        """Leave the group. Idempotent."""
        if self._engine is not None:
            self._engine.comm.leave()
        self._engine = self._reference = self._update = self._rendezvous = None

    @property
    def engine(self) -> PolicyEngine:
        if self._engine is None:
            raise RunFailed(f"a learner rank is used after start, got a call on rank {self.rank} before it; call start(rendezvous)")
        return self._engine

    @property
    def has_reference(self) -> bool:
        """Whether a KL compares the policy with the reference."""
        return uses_reference(self._algorithm, self._actor)

    @property
    def updates(self) -> PolicyUpdate:
        assert self.engine is not None and self._update is not None
        return self._update

    def log_probs(self, share: KVBatchMeta) -> StageReport:
        """Writes ``old_log_probs`` and ``entropy`` of the share's rows, under the weights as they are now; in bypass mode the engine's log-probs."""
        if self._algorithm.rollout_correction.bypass_mode:
            return self._copy_log_probs(share)
        rows = self._rows(share, ["response_mask"])
        columns, report = score_rows(self.engine, rows, self._actor, with_squares="sum_pi_squared" in needed_columns(self._algorithm.adv_estimator))
        self._put(share, columns)
        return report

    def ref_log_probs(self, share: KVBatchMeta) -> StageReport:
        """Writes ``ref_log_prob`` of the share's rows, under the frozen reference."""
        if self._reference is None:
            raise RunFailed("a reference is loaded when a KL needs one, got a call without a KL; set algorithm.use_kl_in_reward or actor.use_kl_loss")
        rows = self._rows(share, ["response_mask"])
        scored = score_tokens(self._reference, rows, self._actor, list(range(len(rows))))
        self._put(share, {"ref_log_prob": scored["log_probs"]})
        return StageReport()

    def _copy_log_probs(self, share: KVBatchMeta) -> StageReport:
        """Bypass mode: the policy that sampled is the old one. No pass, no collective."""
        if len(share):
            try:
                columns = self._get(share, ["response_mask", "rollout_log_probs"])
            except MissingField as error:
                raise missing_log_probs() from error
            rollout, mask = (Column.of(columns[name]) for name in ("rollout_log_probs", "response_mask"))
            check_finite({"rollout_log_probs": rollout.padded()}, mask.padded(), share.keys)
            self._put(share, {"old_log_probs": columns["rollout_log_probs"]})
        return StageReport()

    def advantages(self, batch: KVBatchMeta) -> StageReport:
        """Rank 0, whole groups: writes the columns that the update reads. Runs on the CPU, no collective."""
        read = read_batch(self._store, batch, self._algorithm)
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
        )
        names = ("token_level_scores", "token_level_rewards", "advantages", "returns", "loss_mask", "rollout_is_weights")
        written: dict[str, Any] = {name: read.unpadded(value) for name in names if (value := getattr(judged, name)) is not None}
        self._put(batch, written | {"session_weight": judged.session_weight.float()})
        if self._samples is not None:
            self._samples.write(batch, self._store.kv_batch_get_by_meta)
        judged.report.metrics.update(tag_metrics(batch) | session_metrics(*read_sessions(self._store, batch)))
        return judged.report

    def update(self, work: UpdateWork) -> UpdateReport:
        """One optimizer step per mini-batch; the same report on every rank."""
        weighted = ["session_weight"] if counts_sessions(self._actor) else []
        report = self.updates.run(self._rows(work.meta, self._objective.fields, weighted), work)
        self._last = LastUpdate(work.global_step, report)
        return report

    def last_update(self) -> LastUpdate | None:
        """The newest update that this process finished."""
        return self._last

    def snapshot(self, version: int) -> WeightManifest | None:
        """Write the current weights as ``version``, in the dtype the engines run in."""
        return write_version(self.engine, version, self._weights_dir, self._rollout_dtype, self.probe())

    def probe(self) -> Probe | None:
        """A fixed row and its log-probs under the current weights; None when the configuration has it off."""
        if not self._weights.probe:
            return None
        coarse = torch.bfloat16 in (self._rollout_dtype, getattr(torch, self._learner.dtype))
        tolerance = self._weights.probe_tolerance or (0.5 if coarse else 0.005)
        return make_probe(self.engine, self._seed, tolerance)

    def save(self, folder: str) -> None:
        self.updates.progress.kl_coef = self._controller.beta  # rank 0's counts: it alone moves the controller and writes the progress
        checkpoint.save(self.engine, self.updates.progress, Path(folder))

    def load(self, folder: str) -> None:
        """Weights, optimizer, schedule and KL coefficient. The reference stays the model that the run began with."""
        self.updates.progress = checkpoint.load(self.engine, Path(folder))
        if self.updates.progress.kl_coef is not None and self._algorithm.kl_ctrl.type == "adaptive":
            self._controller.beta = self.updates.progress.kl_coef

    def _rows(self, meta: KVBatchMeta, fields: Sequence[str], scalars: Sequence[str] = ()) -> Rows:
        if not len(meta):
            return Rows.none(fields)
        return Rows.of(meta.keys, self._get(meta, ["input_ids", *fields, *scalars]), fields)

    def _get(self, meta: KVBatchMeta, fields: list[str]) -> TensorDict:
        return get(self._store, meta, fields)

    def _put(self, meta: KVBatchMeta, columns: dict[str, Any]) -> None:
        if len(meta):
            self._store.kv_batch_put_by_meta(meta, columns)

"""One learner rank: reads rows from the store, scores, judges and learns them, writes columns back, and hands weights out.

Implements ``streamrl.protocol.interfaces.Learner``. Guarantees: every call but ``advantages`` is a collective that all ranks make in the
same order with the same number of passes, whatever their shares; reports are reduced, so that each rank returns the same. Knows nothing of
groups' life cycle, staleness or who calls it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from streamrl.config.rollout import ModelConfig
from streamrl.config.training import ActorConfig, AlgorithmConfig, LearnerConfig, WeightsConfig
from streamrl.errors import ConfigError, MissingField, RunFailed
from streamrl.learner import checkpoint
from streamrl.learner.comm import Comm, Rendezvous
from streamrl.learner.engine import PolicyEngine, choose_device, load_policy
from streamrl.learner.judge import judge, spread
from streamrl.learner.publish import make_probe, write_version
from streamrl.learner.rows import Column, Rows
from streamrl.learner.scoring import score_rows
from streamrl.learner.update import PolicyUpdate
from streamrl.protocol.learn import StageReport, UpdateReport, UpdateWork
from streamrl.protocol.meta import KVBatchMeta
from streamrl.protocol.weights import Probe, WeightManifest
from streamrl.telemetry.samples import SampleWriter


class Columns(Protocol):
    """What a rank needs of the store: columns by key, in the order of the keys; all common ones when none are selected."""

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str] | None = None) -> TensorDict: ...
    def kv_batch_put(self, keys: list[str], partition_id: str, fields: dict[str, Any]) -> Any: ...


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
        self._loss_scale_factor = loss_scale_factor
        self._samples = samples
        self._rendezvous: Rendezvous | None = None
        self._engine: PolicyEngine | None = None
        self._update: PolicyUpdate | None = None

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
        self._update = PolicyUpdate(
            self._engine, self._actor, max_consecutive_skips=self._learner.max_consecutive_skips, loss_scale_factor=self._loss_scale_factor
        )

    def stop(self) -> None:
        """Leave the group. Idempotent."""
        if self._engine is not None:
            self._engine.comm.leave()
        self._engine = self._update = self._rendezvous = None

    @property
    def engine(self) -> PolicyEngine:
        if self._engine is None:
            raise RunFailed(f"a learner rank is used after start, got a call on rank {self.rank} before it; call start(rendezvous)")
        return self._engine

    @property
    def updates(self) -> PolicyUpdate:
        assert self.engine is not None and self._update is not None
        return self._update

    def log_probs(self, share: KVBatchMeta) -> StageReport:
        """Writes ``old_log_probs`` and ``entropy`` of the share's rows, under the weights as they are now."""
        rows = self._rows(share, ["response_mask"])
        columns, report = score_rows(self.engine, rows, self._actor)
        if len(rows):
            self._store.kv_batch_put(rows.keys, share.partition_id, fields=columns)
        return report

    def advantages(self, batch: KVBatchMeta) -> StageReport:
        """Rank 0, whole groups: writes the columns that the update reads. Runs on the CPU, no collective."""
        fields = ["response_mask", "rm_scores", "old_log_probs"]
        columns = self._get(batch, fields)
        mask = Column.of(columns["response_mask"])
        rollout = self._rollout_log_probs(batch)
        judged = judge(
            batch.keys,
            mask.padded(),
            Column.of(columns["rm_scores"]).padded(),
            Column.of(columns["old_log_probs"]).padded(),
            None if rollout is None else rollout.padded(),
            self._algorithm,
        )
        names = ("token_level_rewards", "advantages", "returns", "loss_mask", "rollout_is_weights")
        written = {name: _unpadded(value, mask.lengths().tolist()) for name in names if (value := getattr(judged, name)) is not None}
        self._store.kv_batch_put(batch.keys, batch.partition_id, fields=written)
        if self._samples is not None:
            self._samples.write(batch, lambda meta: self._store.kv_batch_get(meta.keys, meta.partition_id))
        judged.report.metrics.update(_length_metrics(batch))
        return judged.report

    def update(self, work: UpdateWork) -> UpdateReport:
        """One optimizer step per mini-batch; the same report on every rank."""
        fields = ["loss_mask", "old_log_probs", "advantages"]
        if self._algorithm.rollout_correction.rollout_is is not None:
            fields.append("rollout_is_weights")
        return self.updates.run(self._rows(work.meta, fields), work)

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
        checkpoint.save(self.engine, self.updates.progress, Path(folder))

    def load(self, folder: str) -> None:
        self.updates.progress = checkpoint.load(self.engine, Path(folder))

    def _rows(self, meta: KVBatchMeta, fields: Sequence[str]) -> Rows:
        if not len(meta):
            return Rows.none(fields)
        return Rows.of(meta.keys, self._get(meta, ["input_ids", *fields]), fields)

    def _get(self, meta: KVBatchMeta, fields: list[str]) -> TensorDict:
        return self._store.kv_batch_get(meta.keys, meta.partition_id, select_fields=fields)

    def _rollout_log_probs(self, batch: KVBatchMeta) -> Column | None:
        """The engine's log-probs: needed by the correction, otherwise only for metrics."""
        try:
            return Column.of(self._get(batch, ["rollout_log_probs"])["rollout_log_probs"])
        except MissingField as error:
            if self._algorithm.rollout_correction.rollout_is is None:
                return None
            raise ConfigError(
                "$.rollout.calculate_log_probs: algorithm.rollout_correction needs the engine's log-probs, got rows without rollout_log_probs; "
                "set rollout.calculate_log_probs=true, or algorithm.rollout_correction.rollout_is=null to train uncorrected"
            ) from error


def _unpadded(values_BR: Tensor, lengths: list[int]) -> list[Tensor]:
    return [row[:length] for row, length in zip(values_BR, lengths, strict=True)]


def _length_metrics(batch: KVBatchMeta) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, tag in (("response_length", "response_len"), ("prompt_length", "prompt_len")):
        metrics |= spread(name, np.array([row[tag] for row in batch.tags if tag in row], dtype=float))
    return metrics

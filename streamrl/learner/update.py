"""An update call of one model: one optimizer step per mini-batch, the same loss and gradient however rows are split over ranks and micro-batches.

Before the first micro-batch of a step all ranks agree on its denominators (trainable tokens, sessions that have one); every micro-batch is
normalised by those alone, so micro-batch gradients simply add up. Rows without a trainable token are not forwarded. A step without a trainable
token or with a non-finite gradient changes nothing and is counted; too many in a row end the run. What the loss is says the ``Lesson``: of the policy
in ``policy_update.py``, of the critic in ``critic.py``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from streamrl.algorithms import losses
from streamrl.config.batching import MicroBatching
from streamrl.config.training import OptimConfig
from streamrl.errors import RunFailed
from streamrl.learner.balance import Parts
from streamrl.learner.engine import TrainableModel
from streamrl.learner.objective import Denominators
from streamrl.learner.passes import plan_passes
from streamrl.learner.rows import MicroBatch, Rows
from streamrl.learner.schedule import learning_rate
from streamrl.protocol.learn import UpdateReport, UpdateWork
from streamrl.protocol.waits import progressed
from streamrl.telemetry.metrics import NullMetrics
from streamrl.telemetry.phases import Phases

log = logging.getLogger(__name__)


class Lesson(Protocol):
    """What an update teaches a model. ``name`` is its section and begins its metrics; it reads ``fields`` of the rows, with ``counts_sessions`` their
    weights too."""

    name: str
    fields: list[str]
    counts_sessions: bool
    batching: MicroBatching
    optim: OptimConfig

    def begin(self) -> None:
        """A new update call."""
        ...

    def prepare(self, rows: Rows, chosen: list[int], global_step: int, number: int) -> Rows:
        """The rows with what the loss needs to know of the whole mini-batch number ``number``, of which ``chosen`` lie on this rank. A collective."""
        ...

    def with_gradient(self, rows: Rows, chosen: list[int]) -> list[int]:
        """Those of ``chosen`` that have to be computed, at least one if there is one: the others add nothing to loss, gradient or metrics. A collective."""
        ...

    def check_parts(self, num_parts: int) -> None:
        """ConfigError when the loss can't be had from that many micro-batches."""
        ...

    def loss(self, batch: MicroBatch, denominators: Denominators) -> tuple[Tensor, dict[str, Tensor]]:
        """The micro-batch's part of the mini-batch loss, times the number of ranks (gradients are averaged over them), and metrics that add up."""
        ...

    def corrected(self, shares: dict[str, float], denominators: Denominators) -> tuple[float, dict[str, float]]:
        """A factor for the whole gradient (0: no token is left) and the metrics that go with it."""
        ...

    def metrics(self) -> dict[str, float]:
        """Of the call; a collective."""
        ...


@dataclass
class Progress:
    """What an update moves beside weights and optimizer state, and the KL coefficient; part of the checkpoint."""

    schedule_position: int = 0  # update calls that moved the weights
    optimizer_steps: int = 0
    skipped_steps: int = 0
    consecutive_skips: int = 0
    kl_coef: float | None = None  # of the KL in the reward, kept by the actor; None: as configured


@dataclass
class _Sums:
    """Metrics of the applied optimizer steps of one call; all values already reduced over ranks."""

    steps: int = 0
    totals: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    trained_tokens: float = 0.0
    computed_tokens: float = 0.0

    def add(self, shares: dict[str, float], peaks: dict[str, float]) -> None:
        self.steps += 1
        for name, value in shares.items():
            self.totals[name] = self.totals.get(name, 0.0) + value
        for name, value in peaks.items():
            self.peaks[name] = max(self.peaks.get(name, value), value)

    def metrics(self) -> dict[str, float]:
        return {name: total / self.steps for name, total in self.totals.items()} | self.peaks


class Update:
    """Runs update calls of ``model`` on one rank."""

    def __init__(self, model: TrainableModel, lesson: Lesson, *, max_consecutive_skips: int, phases: Phases | None = None) -> None:
        self.model = model
        self.lesson = lesson
        self._max_consecutive_skips = max_consecutive_skips
        self.progress = Progress()
        self._phases = phases or Phases(NullMetrics())

    def run(self, rows: Rows, work: UpdateWork) -> UpdateReport:
        """All mini-batches of the call, then one step of the schedule if any of them was applied."""
        rate = learning_rate(self.lesson.optim, self.progress.schedule_position, work.total_steps)
        place = {key: i for i, key in enumerate(rows.keys)}
        sums = _Sums()
        self.lesson.begin()
        for number, keys in enumerate(work.mini_batches):
            self._optimizer_step(rows, [place[key] for key in keys], rate, (work.global_step, number), sums)
        if sums.steps:
            self.progress.schedule_position += 1
        skipped = len(work.mini_batches) - sums.steps
        metrics = self.lesson.metrics() | sums.metrics() | {"lr": rate, "skipped_steps": float(skipped)}
        named = {f"{self.lesson.name}/{name}": value for name, value in metrics.items()}
        return UpdateReport(sums.steps, skipped, named, int(sums.trained_tokens), int(sums.computed_tokens))

    def _optimizer_step(self, rows: Rows, mini_batch: list[int], rate: float, which: tuple[int, int], sums: _Sums) -> None:
        comm, trainable = self.model.comm, rows.columns["loss_mask"].positive().tolist()
        chosen = [i for i in mini_batch if trainable[i]]
        tokens, sequences = comm.sum([sum(trainable[i] for i in chosen), float(rows.weights[chosen].sum())])
        if tokens == 0:
            self._skip("no row of the mini-batch has a trainable token")
            return
        rows = self.lesson.prepare(rows, chosen, *which)
        with self._phases("pack"):
            parts = plan_passes(self.model, rows, self.lesson.with_gradient(rows, chosen), self.lesson.batching)
        self.lesson.check_parts(len(parts))
        denominators = Denominators(tokens, sequences)
        shares, peaks = self._accumulate(rows, parts, denominators)
        factor, shares = self.lesson.corrected(shares, denominators)
        sums.computed_tokens += shares.pop("computed_tokens")
        with self._phases("optimizer"):
            self.model.scale_gradients(factor)
        if factor == 0.0:
            self._skip("the correction rejects every token of the mini-batch")
            return
        with self._phases("optimizer"):
            norm = self.model.step(rate)
        if norm is None:
            self._skip("the gradient norm is not finite")
            return
        self.progress.optimizer_steps += 1
        self.progress.consecutive_skips = 0
        sums.trained_tokens += tokens
        sums.add(shares | {"grad_norm": norm}, peaks)

    def _accumulate(self, rows: Rows, parts: Parts, denominators: Denominators) -> tuple[dict[str, float], dict[str, float]]:
        """Gradients of all micro-batches; metrics reduced over ranks: those that add up, and those that combine by maximum."""
        comm = self.model.comm
        collected: dict[str, list[Tensor]] = {}
        for i, part in enumerate(parts):
            with self._phases("pack"):
                batch = rows.micro_batch(part, "loss_mask", self.model.layout).to(comm.device)
            with self._phases("forward_backward"):
                loss, metrics = self.lesson.loss(batch, denominators)
                self.model.backward(loss, last=i == len(parts) - 1)
            progressed()
            metrics |= {"computed_tokens": torch.tensor(float(batch.computed_tokens))}
            for name, value in metrics.items():
                collected.setdefault(name, []).append(value.detach().to(comm.device, torch.float64))
        adding = [name for name in collected if name not in losses.MAX_METRICS]
        peaking = [name for name in collected if name in losses.MAX_METRICS]
        summed = comm.sum(torch.stack([torch.stack(collected[name]).sum() for name in adding]))
        peaks = comm.max(torch.stack([torch.stack(collected[name]).max() for name in peaking])) if peaking else []
        return dict(zip(adding, summed, strict=True)), dict(zip(peaking, peaks, strict=True))

    def _skip(self, reason: str) -> None:
        name = self.lesson.name
        self.progress.skipped_steps += 1
        self.progress.consecutive_skips += 1
        log.warning("optimizer step of the %s skipped: %s (%d in a row)", name, reason, self.progress.consecutive_skips)
        if self.progress.consecutive_skips >= self._max_consecutive_skips:
            raise RunFailed(
                f"fewer than learner.max_consecutive_skips={self._max_consecutive_skips} optimizer steps may be skipped in a row, got "
                f"{self.progress.consecutive_skips} of the {name} (last: {reason}); weights are as before them: lower {name}.optim.lr or look at the rewards"
            )

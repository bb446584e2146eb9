"""The policy update: one optimizer step per mini-batch, the same loss and gradient however rows are split over ranks and micro-batches.

Before the first micro-batch of a step all ranks agree on its denominators (trainable tokens, sessions that have one) and, for a loss that depends
on its batch, on the tokens it chooses; every micro-batch is normalised by those alone, so micro-batch gradients simply add up. Rows without a
trainable token are not forwarded. A step without a trainable token or with a non-finite gradient changes nothing and is counted; too many in a
row end the run.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from torch import Tensor

from streamrl.algorithms import losses
from streamrl.config.training import ActorConfig
from streamrl.errors import ConfigError, RunFailed
from streamrl.learner.balance import Parts
from streamrl.learner.engine import PolicyEngine
from streamrl.learner.monitor import UpdateMonitor
from streamrl.learner.objective import SELECTED, Denominators, Objective
from streamrl.learner.rows import Rows
from streamrl.learner.schedule import learning_rate
from streamrl.learner.scoring import plan_passes
from streamrl.learner.selection import select_tokens
from streamrl.protocol.learn import UpdateReport, UpdateWork

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """What an update moves beside weights and optimizer state, and the KL coefficient; part of the checkpoint."""

    schedule_position: int = 0  # update calls that moved the weights
    optimizer_steps: int = 0
    skipped_steps: int = 0
    consecutive_skips: int = 0
    kl_coef: float | None = None  # of the KL in the reward; None: as configured


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
        return {f"actor/{name}": total / self.steps for name, total in self.totals.items()} | {f"actor/{name}": value for name, value in self.peaks.items()}


class PolicyUpdate:
    """Runs update calls on one rank."""

    def __init__(self, engine: PolicyEngine, actor: ActorConfig, objective: Objective, *, seed: int, max_consecutive_skips: int) -> None:
        self._engine = engine
        self._actor = actor
        self._objective = objective
        self._seed = seed
        self._max_consecutive_skips = max_consecutive_skips
        self.progress = Progress()

    def run(self, rows: Rows, work: UpdateWork) -> UpdateReport:
        """All mini-batches of the call, then one step of the schedule if any of them was applied."""
        rate = learning_rate(self._actor.optim, self.progress.schedule_position, work.total_steps)
        place = {key: i for i, key in enumerate(rows.keys)}
        sums, monitor = _Sums(), UpdateMonitor(self._actor)
        for number, keys in enumerate(work.mini_batches):
            generator = losses.selection_generator(self._seed, work.global_step, number)
            self._optimizer_step(rows, [place[key] for key in keys], rate, generator, sums, monitor)
        if sums.steps:
            self.progress.schedule_position += 1
        skipped = len(work.mini_batches) - sums.steps
        metrics = monitor.metrics(self._engine.comm) | sums.metrics() | {"actor/lr": rate, "actor/skipped_steps": float(skipped)}
        return UpdateReport(sums.steps, skipped, metrics, int(sums.trained_tokens), int(sums.computed_tokens))

    def _optimizer_step(self, rows: Rows, mini_batch: list[int], rate: float, generator: torch.Generator, sums: _Sums, monitor: UpdateMonitor) -> None:
        comm, trainable = self._engine.comm, rows.columns["loss_mask"].positive().tolist()
        chosen = [i for i in mini_batch if trainable[i]]
        tokens, sequences = comm.sum([sum(trainable[i] for i in chosen), float(rows.weights[chosen].sum())])
        if tokens == 0:
            self._skip("no row of the mini-batch has a trainable token")
            return
        if (select := self._objective.select) is not None:
            rows = rows.with_column(SELECTED, select_tokens(self._engine, rows, chosen, self._actor, select, generator))
        parts = plan_passes(comm, rows, chosen, self._actor)
        self._refuse_parts(len(parts))
        denominators = Denominators(tokens, sequences)
        shares, peaks = self._accumulate(rows, parts, denominators, monitor)
        factor, shares = self._objective.corrected(shares, denominators)
        sums.computed_tokens += shares.pop("computed_tokens")
        self._engine.scale_gradients(factor)
        if factor == 0.0:
            self._skip("the correction rejects every token of the mini-batch")
            return
        norm = self._engine.step(rate)
        if norm is None:
            self._skip("the gradient norm is not finite")
            return
        self.progress.optimizer_steps += 1
        self.progress.consecutive_skips = 0
        sums.trained_tokens += tokens
        sums.add(shares | {"grad_norm": norm}, peaks)

    def _accumulate(self, rows: Rows, parts: Parts, denominators: Denominators, monitor: UpdateMonitor) -> tuple[dict[str, float], dict[str, float]]:
        """Gradients of all micro-batches; metrics reduced over ranks: those that add up, and those that combine by maximum."""
        comm = self._engine.comm
        collected: dict[str, list[Tensor]] = {}
        for i, part in enumerate(parts):
            batch = rows.micro_batch(part, "loss_mask").to(comm.device)
            scored = self._engine.score(batch, with_entropy=self._objective.with_entropy)
            loss, metrics = self._objective(batch, scored, denominators, comm.ranks)
            self._engine.backward(loss, last=i == len(parts) - 1)
            monitor.add(batch, scored.log_probs)
            metrics |= {"computed_tokens": torch.tensor(float(batch.computed_tokens))}
            for name, value in metrics.items():
                collected.setdefault(name, []).append(value.detach().to(comm.device, torch.float64))
        adding = [name for name in collected if name not in losses.MAX_METRICS]
        peaking = [name for name in collected if name in losses.MAX_METRICS]
        summed = comm.sum(torch.stack([torch.stack(collected[name]).sum() for name in adding]))
        peaks = comm.max(torch.stack([torch.stack(collected[name]).max() for name in peaking])) if peaking else []
        return dict(zip(adding, summed, strict=True)), dict(zip(peaking, peaks, strict=True))

    def _refuse_parts(self, num_parts: int) -> None:
        """A loss that depends on its batch and prepares nothing must see the mini-batch at once."""
        ranks = self._engine.comm.ranks
        if self._objective.whole_mini_batch and num_parts * ranks > 1:
            raise ConfigError(
                f"$.actor.policy_loss.loss_mode: {self._actor.policy_loss.loss_mode} depends on its batch and has no select, so it must see a mini-batch at "
                f"once, got {num_parts} micro-batches on {ranks} ranks; use one rank and no micro-batch size, or give the loss a select"
            )

    def _skip(self, reason: str) -> None:
        self.progress.skipped_steps += 1
        self.progress.consecutive_skips += 1
        log.warning("optimizer step skipped: %s (%d in a row)", reason, self.progress.consecutive_skips)
        if self.progress.consecutive_skips >= self._max_consecutive_skips:
            raise RunFailed(
                f"fewer than learner.max_consecutive_skips={self._max_consecutive_skips} optimizer steps may be skipped in a row, got "
                f"{self.progress.consecutive_skips} (last: {reason}); weights are as before them: lower actor.optim.lr or look at the rewards"
            )

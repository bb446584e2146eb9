"""Messages between the trainer (a dispatcher without tensors) and the learner ranks."""

from __future__ import annotations

import msgspec

from streamrl.protocol.meta import KVBatchMeta


class UpdateWork(msgspec.Struct):
    """One rank's share of an update. ``mini_batches[i]`` are the keys of the rank's rows in optimizer step i (may be empty: the rank
    then runs the same number of micro-batches on padding rows). Epochs are unrolled: steps of epoch 0 first."""

    meta: KVBatchMeta  # the rank's rows of the whole batch, each once
    mini_batches: list[list[str]]
    global_step: int
    total_steps: int  # horizon of the learning-rate schedule


class StageReport(msgspec.Struct):
    """Metrics of one stage; names are verl's (``actor/pg_loss``), values already reduced over ranks. ``rejected`` lists (key, rule)."""

    metrics: dict[str, float] = {}
    rejected: list[tuple[str, str]] = []


class UpdateReport(msgspec.Struct):
    """What an update did. ``applied`` counts optimizer steps that moved the weights; of the policy, 0 means that the version must not advance."""

    applied: int
    skipped: int
    metrics: dict[str, float] = {}
    trained_tokens: int = 0  # tokens with loss_mask 1, all ranks
    computed_tokens: int = 0  # tokens forwarded including padding, all ranks


class StepUpdates(msgspec.Struct):
    """What the updates of one step did, each once: how another trainer learns what became of the step that it did not begin. None: not asked for (yet)."""

    global_step: int
    critic: UpdateReport | None = None
    actor: UpdateReport | None = None

    @property
    def moved_policy(self) -> bool:
        """Whether there is a new version."""
        return self.actor is not None and self.actor.applied > 0

    def total(self) -> UpdateReport:
        """Both as one report; tokens are counted once."""
        done = [report for report in (self.critic, self.actor) if report is not None]
        metrics = {name: value for report in done for name, value in report.metrics.items()}
        trained, computed = max(report.trained_tokens for report in done), sum(report.computed_tokens for report in done)
        return UpdateReport(sum(report.applied for report in done), sum(report.skipped for report in done), metrics, trained, computed)

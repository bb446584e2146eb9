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
    """What an update did. ``applied`` counts optimizer steps that moved the weights; 0 means the version must not advance."""

    applied: int
    skipped: int
    metrics: dict[str, float] = {}
    trained_tokens: int = 0  # tokens with loss_mask 1, all ranks
    computed_tokens: int = 0  # tokens forwarded including padding, all ranks


class LastUpdate(msgspec.Struct):
    """The newest update that a learner finished: how another trainer learns what became of the one it did not ask for."""

    global_step: int
    report: UpdateReport

"""Scoring passes: what a policy says of every token that the rollout wrote. The policy before this step's first update gives the old log-probs.

Values on observation tokens are 0.0, as in ``rollout_log_probs``. All ranks run the same number of micro-batches, so that a rank with few
rows does not leave the others waiting in a gather. A value that is not finite ends the stage on all ranks, with the keys of its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from streamrl.config.batching import MicroBatching
from streamrl.config.training import ActorConfig
from streamrl.errors import RunFailed
from streamrl.learner.balance import Parts
from streamrl.learner.comm import Comm
from streamrl.learner.forward import Scored
from streamrl.learner.passes import Model, plan_passes
from streamrl.learner.rows import MicroBatch, Rows
from streamrl.protocol.learn import StageReport
from streamrl.protocol.waits import progressed

Columns = dict[str, list[Tensor]]  # one float32 tensor per row, in the rows' order


class Scorer(Model, Protocol):
    """The policy, or the reference."""

    def score(self, batch: MicroBatch, *, with_entropy: bool = False, with_squares: bool = False) -> Scored: ...


class Keeper(Scorer, Protocol):
    """The policy, whose update may go on from a pass."""

    def score_and_keep(self, batch: MicroBatch, *, with_entropy: bool = False, with_squares: bool = False) -> Scored: ...


def score_rows(policy: Keeper, rows: Rows, actor: ActorConfig, *, with_squares: bool = False, keep: bool = False) -> tuple[Columns, StageReport]:
    """Columns ``old_log_probs``, ``entropy`` and, when asked for, ``sum_pi_squared``; the stage's metrics over all ranks. ``keep``: the step has one
    update, so a pass that holds all rows of the rank is kept for it."""
    chosen = list(range(len(rows)))
    passes = plan_passes(policy, rows, chosen, actor, training=keep)
    score = policy.score_and_keep if keep and len(passes) == 1 else policy.score

    def forward(batch: MicroBatch) -> dict[str, Tensor]:
        return score(batch, with_entropy=True, with_squares=with_squares)._asdict()

    names = ["log_probs", "entropy", *(["sum_pi_squared"] if with_squares else [])]
    columns = token_columns(forward, names, policy, rows, actor, chosen, passes=passes)
    columns["old_log_probs"] = columns.pop("log_probs")
    tokens = int(rows.columns["response_mask"].positive().sum())
    entropy_sum, tokens_sum = policy.comm.sum([sum(float(row.double().sum()) for row in columns["entropy"]), tokens])
    return columns, StageReport(metrics={"actor/entropy": entropy_sum / max(tokens_sum, 1.0)})


def score_tokens(
    policy: Scorer,
    rows: Rows,
    actor: ActorConfig,
    chosen: list[int],
    *,
    mask_field: str = "response_mask",
    with_entropy: bool = False,
    with_squares: bool = False,
) -> Columns:
    """The fields of ``Scored`` that were asked for, as columns; rows that are not ``chosen`` stay empty."""
    names = ["log_probs", *(["entropy"] if with_entropy else []), *(["sum_pi_squared"] if with_squares else [])]

    def forward(batch: MicroBatch) -> dict[str, Tensor]:
        return policy.score(batch, with_entropy=with_entropy, with_squares=with_squares)._asdict()

    return token_columns(forward, names, policy, rows, actor, chosen, mask_field=mask_field)


@torch.no_grad()
def token_columns(
    forward: Callable[[MicroBatch], dict[str, Tensor]],
    names: list[str],
    model: Model,
    rows: Rows,
    sizes: MicroBatching,
    chosen: list[int],
    *,
    mask_field: str = "response_mask",
    passes: Parts | None = None,
) -> Columns:
    """Of what ``forward`` gives for the selected tokens of each micro-batch, each [N], those with ``names`` as columns."""
    lengths = rows.columns[mask_field].lengths().tolist()
    columns: Columns = {name: [torch.empty(0)] * len(rows) for name in names}
    for part in passes or plan_passes(model, rows, chosen, sizes, training=False):
        batch = rows.micro_batch(part, mask_field, model.layout).to(model.comm.device)
        values = forward(batch)
        progressed()
        for name in names if part else []:
            for i, row in zip(part, batch.spread(values[name]).cpu(), strict=True):
                columns[name][i] = row[: lengths[i]]
    _check_finite(model.comm, rows.keys, columns)
    return columns


def _check_finite(comm: Comm, keys: list[str], columns: Columns) -> None:
    bad = [keys[i] for i in range(len(keys)) if not all(bool(torch.isfinite(column[i]).all()) for column in columns.values())]
    total = int(comm.sum([len(bad)])[0])
    if total:
        raise RunFailed(
            f"{', '.join(columns)} of model tokens are finite, got NaN or Inf in {total} rows, of this rank {bad[:3]}; the weights or the rows are broken: "
            "look at the rows, resume from an older checkpoint or lower actor.optim.lr"
        )

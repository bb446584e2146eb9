"""Scoring passes: what a policy says of every token that the rollout wrote. The policy before this step's first update gives the old log-probs.

Values on observation tokens are 0.0, as in ``rollout_log_probs``. All ranks run the same number of micro-batches, so that a rank with few
rows does not leave the others waiting in a gather. A value that is not finite ends the stage on all ranks, with the keys of its rows.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from streamrl.config.training import ActorConfig
from streamrl.errors import RunFailed
from streamrl.learner.balance import Parts, check_budget, padded_micro_batches
from streamrl.learner.comm import Comm
from streamrl.learner.forward import Scored
from streamrl.learner.rows import MicroBatch, Rows
from streamrl.protocol.learn import StageReport

Columns = dict[str, list[Tensor]]  # one float32 tensor per row, in the rows' order


class Scorer(Protocol):
    """The policy, or the reference."""

    comm: Comm

    def score(self, batch: MicroBatch, *, with_entropy: bool = False, with_squares: bool = False) -> Scored: ...


def plan_passes(comm: Comm, rows: Rows, chosen: list[int], actor: ActorConfig) -> Parts:
    """Micro-batches of the rows ``chosen``; every rank gets the largest rank's number, empty ones where it has fewer."""
    lengths = rows.ids.lengths()[torch.tensor(chosen, dtype=torch.long)].tolist()
    max_tokens = actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None
    if max_tokens is not None:
        check_budget(lengths, max_tokens, [rows.keys[i] for i in chosen])
    max_rows = None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu
    parts = padded_micro_batches(lengths, max_tokens=max_tokens, max_rows=max_rows)
    count = int(comm.max([len(parts)])[0])
    return [[chosen[i] for i in part] for part in parts] + [[] for _ in range(count - len(parts))]


def score_rows(policy: Scorer, rows: Rows, actor: ActorConfig, *, with_squares: bool = False) -> tuple[Columns, StageReport]:
    """Columns ``old_log_probs``, ``entropy`` and, when asked for, ``sum_pi_squared``; the stage's metrics over all ranks."""
    columns = score_tokens(policy, rows, actor, list(range(len(rows))), with_entropy=True, with_squares=with_squares)
    columns["old_log_probs"] = columns.pop("log_probs")
    tokens = int(rows.columns["response_mask"].positive().sum())
    entropy_sum, tokens_sum = policy.comm.sum([sum(float(row.double().sum()) for row in columns["entropy"]), tokens])
    return columns, StageReport(metrics={"actor/entropy": entropy_sum / max(tokens_sum, 1.0)})


@torch.no_grad()
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
    sizes = rows.columns[mask_field].lengths().tolist()
    columns: Columns = {name: [torch.empty(0)] * len(rows) for name in names}
    for part in plan_passes(policy.comm, rows, chosen, actor):
        batch = rows.micro_batch(part, mask_field).to(policy.comm.device)
        scored = policy.score(batch, with_entropy=with_entropy, with_squares=with_squares)
        for name in names if part else []:
            for i, row in zip(part, batch.spread(getattr(scored, name)).cpu(), strict=True):
                columns[name][i] = row[: sizes[i]]
    _check_finite(policy.comm, rows.keys, columns)
    return columns


def _check_finite(comm: Comm, keys: list[str], columns: Columns) -> None:
    bad = [keys[i] for i in range(len(keys)) if not all(bool(torch.isfinite(column[i]).all()) for column in columns.values())]
    total = int(comm.sum([len(bad)])[0])
    if total:
        raise RunFailed(
            f"{', '.join(columns)} of model tokens are finite, got NaN or Inf in {total} rows, of this rank {bad[:3]}; the weights or the rows are broken: "
            "look at the rows, resume from an older checkpoint or lower actor.optim.lr"
        )

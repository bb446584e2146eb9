"""The old-log-prob stage: what the weights before this step's first update say about every token the policy wrote.

Values on observation tokens are 0.0, as in ``rollout_log_probs``. All ranks run the same number of micro-batches, so that a rank with few
rows does not leave the others waiting in a gather.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.config.training import ActorConfig
from streamrl.learner.balance import Parts, check_budget, padded_micro_batches
from streamrl.learner.engine import PolicyEngine
from streamrl.learner.rows import Rows
from streamrl.protocol.learn import StageReport


def plan_passes(engine: PolicyEngine, rows: Rows, chosen: list[int], actor: ActorConfig) -> Parts:
    """Micro-batches of the rows ``chosen``; every rank gets the largest rank's number, empty ones where it has fewer."""
    lengths = rows.ids.lengths()[torch.tensor(chosen, dtype=torch.long)].tolist()
    max_tokens = actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None
    if max_tokens is not None:
        check_budget(lengths, max_tokens, [rows.keys[i] for i in chosen])
    max_rows = None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu
    parts = padded_micro_batches(lengths, max_tokens=max_tokens, max_rows=max_rows)
    count = int(engine.comm.max([len(parts)])[0])
    return [[chosen[i] for i in part] for part in parts] + [[] for _ in range(count - len(parts))]


@torch.no_grad()
def score_rows(engine: PolicyEngine, rows: Rows, actor: ActorConfig) -> tuple[dict[str, list[Tensor]], StageReport]:
    """Columns ``old_log_probs`` and ``entropy`` (one float32 tensor per row, in the rows' order) and the stage's metrics over all ranks."""
    sizes = rows.columns["response_mask"].lengths().tolist()
    columns: dict[str, list[Tensor]] = {name: [torch.empty(0)] * len(rows) for name in ("old_log_probs", "entropy")}
    entropy_sum = tokens = 0.0
    for part in plan_passes(engine, rows, list(range(len(rows))), actor):
        batch = rows.micro_batch(part, "response_mask").to(engine.comm.device)
        log_probs_N, entropy_N = engine.score(batch, with_entropy=True)
        if not part:
            continue
        entropy_sum, tokens = entropy_sum + float(entropy_N.double().sum()), tokens + len(entropy_N)
        for name, values_N in (("old_log_probs", log_probs_N), ("entropy", entropy_N)):
            for i, row in zip(part, batch.spread(values_N).cpu(), strict=True):
                columns[name][i] = row[: sizes[i]]
    entropy_sum, tokens = engine.comm.sum([entropy_sum, tokens])
    return columns, StageReport(metrics={"actor/entropy": entropy_sum / max(tokens, 1.0)})

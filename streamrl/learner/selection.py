"""The tokens that a batch-dependent loss chooses: once for a whole mini-batch, before its first micro-batch, over the rows of all ranks.

Guarantees: the choice depends on neither micro-batches, ranks nor row order, for every rank makes it on all tokens in one order, by a hash of their
row's key, with one generator. Costs a forward pass without gradient and one gather of four numbers a token.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from streamrl.algorithms.losses.tokens import Select
from streamrl.config.training import ActorConfig
from streamrl.learner.rows import Column, Rows
from streamrl.learner.scoring import Scorer, score_tokens

_HASH_BITS = 52  # what a float64 holds exactly


def select_tokens(policy: Scorer, rows: Rows, chosen: list[int], actor: ActorConfig, select: Select, generator: torch.Generator) -> Column:
    """1.0 on the selected response tokens of ``rows``, 0.0 elsewhere; ``chosen`` are the mini-batch's rows of this rank."""
    log_probs = score_tokens(policy, rows, actor, chosen, mask_field="loss_mask")["log_probs"]
    mask, places = rows.columns["loss_mask"], []
    for i in chosen:
        start, end = int(mask.offsets[i]), int(mask.offsets[i + 1])
        places.append(start + torch.nonzero(mask.values[start:end]).flatten())
    places_K = torch.cat(places) if places else torch.zeros(0, dtype=torch.long)
    new = torch.zeros(len(mask.values), dtype=torch.float64)
    for i in chosen:
        new[int(mask.offsets[i]) : int(mask.offsets[i + 1])] = log_probs[i].double()
    keys = [torch.full((len(part),), _hash(rows.keys[i]), dtype=torch.float64) for i, part in zip(chosen, places, strict=True)]
    fields = [rows.columns["old_log_probs"].values, new, rows.columns["advantages"].values]
    local = torch.stack([torch.cat(keys) if keys else torch.zeros(0, dtype=torch.float64), *(values[places_K].double() for values in fields)])
    everything, mine = policy.comm.gather(local)
    out = torch.zeros(len(mask.values))
    out[places_K] = _selected(everything, actor, select, generator)[mine].float()
    return Column(out, mask.offsets)


def _selected(everything_4K: Tensor, actor: ActorConfig, select: Select, generator: torch.Generator) -> Tensor:
    """bool [K], in the order given; chosen in the order of the keys' hashes."""
    order = everything_4K[0].argsort(stable=True)
    _, old, new, advantages = everything_4K[:, order].unsqueeze(1)
    chosen = select(old, new, advantages, torch.ones_like(old, dtype=torch.bool), config=actor, generator=generator)
    out = torch.zeros(len(order), dtype=torch.bool)
    out[order] = chosen.flatten()
    return out


def _hash(key: str) -> float:
    return float(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> (64 - _HASH_BITS))

"""Who computes what in a step, from keys and tags alone: mini-batches of whole groups, and the rank of each row inside them.

Guarantees: a mini-batch's groups depend on neither the number of ranks nor the balancing; the number of optimizer steps depends on the
number of groups only; each row belongs to one rank for all epochs, and ``plan_shares`` and ``plan_update`` deal alike. Imports no torch.
"""

from __future__ import annotations

import random
from itertools import pairwise

from streamrl.config.training import ActorConfig
from streamrl.errors import ProtocolError
from streamrl.learner.balance import balanced_partitions
from streamrl.protocol.keys import TrajectoryKey
from streamrl.protocol.learn import UpdateWork
from streamrl.protocol.meta import KVBatchMeta

Groups = list[list[str]]  # the keys of each group, groups and keys in batch order


def plan_shares(meta: KVBatchMeta, ranks: int, actor: ActorConfig, *, balance: bool = True) -> list[KVBatchMeta]:
    """The rows of each rank, each row exactly once; a share may be empty when there are fewer rows than ranks."""
    owner = _deal(meta, ranks, _mini_batches(_groups(meta), actor, epoch=0), balance)
    return [meta.select_keys([key for key in meta.keys if owner[key] == rank]) for rank in range(ranks)]


def plan_update(meta: KVBatchMeta, ranks: int, actor: ActorConfig, *, global_step: int, total_steps: int, balance: bool = True) -> list[UpdateWork]:
    """One work per rank. Six rows of two groups, ``ppo_mini_batch_size`` 2, two ranks, two epochs: two optimizer steps of three rows per rank."""
    groups = _groups(meta)
    epochs = [_mini_batches(groups, actor, epoch) for epoch in range(actor.ppo_epochs)]
    owner = _deal(meta, ranks, epochs[0], balance) if groups else {}
    steps = [mini_batch for epoch in epochs for mini_batch in epoch]
    works = []
    for rank in range(ranks):
        share = meta.select_keys([key for key in meta.keys if owner[key] == rank])
        works.append(UpdateWork(share, [[key for key in step if owner[key] == rank] for step in steps], global_step, total_steps))
    return works


def _groups(meta: KVBatchMeta) -> Groups:
    groups: dict[str, list[str]] = {}
    for key in meta.keys:
        groups.setdefault(TrajectoryKey.parse(key).uid, []).append(key)
    return list(groups.values())


def _mini_batches(groups: Groups, actor: ActorConfig, epoch: int) -> list[list[str]]:
    """The keys of each optimizer step of an epoch: ``ppo_mini_batch_size`` groups at a time, in batch order or a seeded permutation."""
    order = list(groups)
    if actor.shuffle:
        random.Random(f"{actor.data_loader_seed}:{epoch}").shuffle(order)
    size = actor.ppo_mini_batch_size
    return [[key for group in order[start : start + size] for key in group] for start in range(0, len(order), size)]


def _deal(meta: KVBatchMeta, ranks: int, mini_batches: list[list[str]], balance: bool) -> dict[str, int]:
    """The rank of each row: like work for every rank inside every mini-batch of the first epoch."""
    tags = dict(zip(meta.keys, meta.tags, strict=True))
    owner: dict[str, int] = {}
    for keys in mini_batches:
        lengths = [_length(key, tags[key]) for key in keys]
        for rank, part in enumerate(_parts(lengths, ranks, balance)):
            owner |= {keys[i]: rank for i in part}
    return owner


def _parts(lengths: list[int], ranks: int, balance: bool) -> list[list[int]]:
    if balance and ranks > 1 and len(lengths) >= ranks:
        return balanced_partitions(lengths, ranks)
    bounds = [len(lengths) * rank // ranks for rank in range(ranks + 1)]
    return [list(range(low, high)) for low, high in pairwise(bounds)]


def _length(key: str, tag: dict) -> int:
    length = tag.get("seq_len")
    if not isinstance(length, int) or length < 1:
        raise ProtocolError(f"the tag of a finished row carries seq_len >= 1, got {length!r} in {key}; the rollout sets it with the row")
    return length

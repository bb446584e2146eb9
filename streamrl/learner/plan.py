"""Who computes what in a step, from keys and tags alone: mini-batches of whole groups, and the rank of each row inside them.

Guarantees: a mini-batch's groups depend on neither the number of ranks nor the balancing; the number of optimizer steps depends on the
number of groups only; each row belongs to one rank for all epochs, and ``plan_shares`` and ``plan_update`` deal alike. Imports no torch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from streamrl.config.batching import Batching
from streamrl.errors import ProtocolError
from streamrl.learner.balance import LINEAR, Parts, Prompt, balanced_partitions, partition_works, shared_workload
from streamrl.protocol.keys import TrajectoryKey
from streamrl.protocol.learn import UpdateWork
from streamrl.protocol.meta import KVBatchMeta

Groups = list[list[str]]  # the keys of each group, groups and keys in batch order


class Dealing(NamedTuple):
    """How rows come to ranks. ``whole_groups``: a group may stay together, for its rows share their prompt."""

    balance: bool = True  # False: in batch order
    whole_groups: bool = False
    linear: int = LINEAR  # of the work of a row


def plan_shares(meta: KVBatchMeta, ranks: int, actor: Batching, dealing: Dealing = Dealing()) -> list[KVBatchMeta]:
    """The rows of each rank, each row exactly once; a share may be empty when there are fewer rows than ranks."""
    owner = _deal(meta, ranks, _mini_batches(_groups(meta), actor, epoch=0), dealing)
    return [meta.select_keys([key for key in meta.keys if owner[key] == rank]) for rank in range(ranks)]


def plan_update(meta: KVBatchMeta, ranks: int, actor: Batching, dealing: Dealing = Dealing(), *, global_step: int, total_steps: int) -> list[UpdateWork]:
    """One work per rank. Six rows of two groups, ``ppo_mini_batch_size`` 2, two ranks, two epochs: two optimizer steps of three rows per rank."""
    groups = _groups(meta)
    epochs = [_mini_batches(groups, actor, epoch) for epoch in range(actor.ppo_epochs)]
    owner = _deal(meta, ranks, epochs[0], dealing) if groups else {}
    steps = [mini_batch for epoch in epochs for mini_batch in epoch]
    works = []
    for rank in range(ranks):
        share = meta.select_keys([key for key in meta.keys if owner[key] == rank])
        works.append(UpdateWork(share, [[key for key in step if owner[key] == rank] for step in steps], global_step, total_steps))
    return works


def length_metrics(meta: KVBatchMeta, shares: list[KVBatchMeta]) -> dict[str, float]:
    """Tokens of a rank, were rows dealt in batch order and as they are dealt."""
    lengths = [_length(key, tag) for key, tag in zip(meta.keys, meta.tags, strict=True)]
    before = [sum(lengths[low:high]) for low, high in _even(len(lengths), len(shares))]
    after = [sum(_length(key, tag) for key, tag in zip(share.keys, share.tags, strict=True)) for share in shares]
    found = {"min": min(before), "max": max(before), "minmax_diff": max(before) - min(before), "balanced_min": min(after), "balanced_max": max(after)}
    return {f"global_seqlen/{name}": float(value) for name, value in found.items()} | {"global_seqlen/mean": sum(lengths) / len(shares)}


def _groups(meta: KVBatchMeta) -> Groups:
    groups: dict[str, list[str]] = {}
    for key in meta.keys:
        groups.setdefault(TrajectoryKey.parse(key).uid, []).append(key)
    return list(groups.values())


def _mini_batches(groups: Groups, actor: Batching, epoch: int) -> list[list[str]]:
    """The keys of each optimizer step of an epoch: ``ppo_mini_batch_size`` groups at a time, in batch order or a seeded permutation."""
    order = list(groups)
    if actor.shuffle:
        random.Random(f"{actor.data_loader_seed}:{epoch}").shuffle(order)
    size = actor.ppo_mini_batch_size
    return [[key for group in order[start : start + size] for key in group] for start in range(0, len(order), size)]


def _deal(meta: KVBatchMeta, ranks: int, mini_batches: list[list[str]], dealing: Dealing) -> dict[str, int]:
    """The rank of each row: like work for every rank inside every mini-batch of the first epoch."""
    tags = dict(zip(meta.keys, meta.tags, strict=True))
    owner: dict[str, int] = {}
    for keys in mini_batches:
        for rank, part in enumerate(_parts(keys, [tags[key] for key in keys], ranks, dealing)):
            owner |= {keys[i]: rank for i in part}
    return owner


def _parts(keys: list[str], tags: list[dict], ranks: int, dealing: Dealing) -> Parts:
    """Whole groups where the busiest rank has no more to compute so than with rows dealt one by one."""
    lengths = [_length(key, tag) for key, tag in zip(keys, tags, strict=True)]
    if not dealing.balance or ranks == 1 or len(lengths) < ranks:
        return [list(range(low, high)) for low, high in _even(len(lengths), ranks)]
    by_rows = balanced_partitions(lengths, ranks, linear=dealing.linear)
    groups: dict[str, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(TrajectoryKey.parse(key).uid, []).append(i)
    if not dealing.whole_groups or len(groups) < ranks:
        return by_rows
    prompts = [Prompt(TrajectoryKey.parse(key).uid, tag.get("prompt_len", 0)) for key, tag in zip(keys, tags, strict=True)]

    def work(rows: list[int]) -> int:
        return shared_workload(lengths, prompts, rows, dealing.linear)

    members = list(groups.values())
    by_groups = [sorted(i for g in part for i in members[g]) for part in partition_works([work(rows) for rows in members], ranks)]
    return min(by_groups, by_rows, key=lambda parts: max(map(work, parts)))


def _even(count: int, ranks: int) -> Iterator[tuple[int, int]]:
    return pairwise(count * rank // ranks for rank in range(ranks + 1))


def _length(key: str, tag: dict) -> int:
    length = tag.get("seq_len")
    if not isinstance(length, int) or length < 1:
        raise ProtocolError(f"the tag of a finished row carries seq_len >= 1, got {length!r} in {key}; the rollout sets it with the row")
    return length

"""Which rows of a rank go through the model together: micro-batches by rows or by tokens, the same number on every rank.

By tokens, what counts is what is computed: a shared prompt once, padding too; no micro-batch has more than the budget. Where the configuration names no
size, micro-batches are as large as pays, and memory is bounded by the longest row or the tokens of one shared prompt.
"""

from __future__ import annotations

from typing import Protocol

from streamrl.config.batching import MicroBatching
from streamrl.learner.balance import Parts, Prompt, check_budget, computed_tokens, grouped_micro_batches, micro_batches, padded_micro_batches
from streamrl.learner.comm import Comm
from streamrl.learner.packing import Layout
from streamrl.learner.rows import Rows

FASTEST_TOKENS = 4096  # of a pass; a larger one is no faster, a smaller one pays more often for what a pass costs
GROUP_TOKENS = 16384  # a larger pass where rows share a prompt: cut, they would compute it several times


class Model(Protocol):
    """What passes are cut for."""

    @property
    def comm(self) -> Comm: ...
    @property
    def layout(self) -> Layout: ...


def plan_passes(model: Model, rows: Rows, chosen: list[int], sizes: MicroBatching, *, training: bool = True) -> Parts:
    """Micro-batches of the rows ``chosen``; every rank gets the largest rank's number, empty ones where it has fewer."""
    lengths, budget, max_rows = [rows.lengths[i] for i in chosen], _budget(sizes, training), sizes.ppo_micro_batch_size_per_gpu
    if budget is not None:
        check_budget(lengths, budget, [rows.keys[i] for i in chosen])
    tokens = budget or max([FASTEST_TOKENS, *lengths])
    prompts = _prompts(model, rows, chosen)

    def cut(count: int) -> Parts:
        if not model.layout.packed:
            return padded_micro_batches(lengths, max_tokens=None if max_rows else tokens, max_rows=max_rows, count=count)
        if max_rows:
            return _by_rows(prompts, max_rows, count)
        group_tokens = budget or max(GROUP_TOKENS, tokens)
        return grouped_micro_batches(lengths, prompts, max_tokens=tokens, max_group_tokens=group_tokens, count=count, linear=model.layout.workload_linear)

    count = int(model.comm.max([len(cut(0))])[0])
    return [[chosen[i] for i in part] for part in cut(count)]


def cost(model: Model, rows: Rows, chosen: list[int]) -> int:
    """Tokens that a pass of these rows computes, without padding."""
    return computed_tokens([rows.lengths[i] for i in chosen], _prompts(model, rows, chosen), range(len(chosen)))


def _prompts(model: Model, rows: Rows, chosen: list[int]) -> list[Prompt]:
    return [Prompt(rows.prompts[i] if model.layout.shared_prompts else i, rows.prompt_lengths[i]) for i in chosen]


def _budget(sizes: MicroBatching, training: bool) -> int | None:
    """The configuration's."""
    if not sizes.use_dynamic_bsz:
        return None
    return sizes.ppo_max_token_len_per_gpu if training else sizes.log_prob_max_token_len_per_gpu or sizes.ppo_max_token_len_per_gpu


def _by_rows(prompts: list[Prompt], max_rows: int, count: int) -> Parts:
    """In their order, but rows of one prompt behind another."""
    first = {prompt: i for i, prompt in reversed(list(enumerate(prompts)))}
    order = sorted(range(len(prompts)), key=lambda i: first[prompts[i]])
    return [[order[j] for j in part] for part in micro_batches(order, max_rows=max_rows, count=count)]

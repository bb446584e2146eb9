"""Micro-batches of a rank's rows: budgets count what is computed, and every rank runs as many."""

import random
from typing import NamedTuple

import pytest
import torch

from streamrl.config.training import ActorConfig
from streamrl.errors import ProtocolError
from streamrl.learner.packing import Layout
from streamrl.learner.passes import FASTEST_TOKENS, plan_passes
from streamrl.learner.rows import Column, Rows

PADDED, PACKED, SHARED = Layout(), Layout(packed=True), Layout(packed=True, shared_prompts=True)


class Ranks:
    """A rank beside one that needs ``most`` micro-batches."""

    def __init__(self, most: int = 0) -> None:
        self.most = most

    def max(self, values):
        return [max(values[0], self.most)]


class Model(NamedTuple):
    layout: Layout
    comm: Ranks = Ranks()


def rows_of(groups) -> Rows:
    """(tokens of the prompt, tokens of each response); prompts of different groups differ."""
    keys, ids, responses = [], [], []
    for g, (prompt, sizes) in enumerate(groups):
        for s, size in enumerate(sizes):
            keys.append(f"g{g}_{s}_0")
            ids.append(torch.full((prompt + size,), g))
            responses.append(torch.ones(size))
    columns = [torch.nested.nested_tensor(values, layout=torch.jagged) for values in (ids, responses)]
    return Rows(keys, Column.of(columns[0]), {"loss_mask": Column.of(columns[1])}, torch.ones(len(keys), dtype=torch.float64))


def cut(rows, layout, most=0, training=True, **sizes):
    return plan_passes(Model(layout, Ranks(most)), rows, list(range(len(rows))), ActorConfig(**sizes), training=training)


def computed(rows, parts, layout):
    return [rows.micro_batch(part, "loss_mask", layout).computed_tokens for part in parts if part]


def long_tailed(num_groups, n, seed=0):
    draw = random.Random(seed)
    return [(draw.randint(20, 400), [min(8000, max(1, int(draw.lognormvariate(5.5, 1.2)))) for _ in range(n)]) for _ in range(num_groups)]


@pytest.mark.parametrize("layout", [PADDED, PACKED, SHARED])
@pytest.mark.parametrize("budget", [8400, 16384])
def test_no_micro_batch_computes_more_than_the_budget(layout, budget):
    rows = rows_of(long_tailed(12, 6))
    parts = cut(rows, layout, use_dynamic_bsz=True, ppo_max_token_len_per_gpu=budget)
    assert sorted(i for part in parts for i in part) == list(range(len(rows)))
    assert max(computed(rows, parts, layout)) <= budget


def test_packed_rows_compute_no_padding_and_padded_ones_little_on_long_tailed_lengths():
    rows = rows_of(long_tailed(40, 4, seed=3))
    real = sum(rows.lengths)
    assert sum(computed(rows, cut(rows, PACKED), PACKED)) == real
    assert sum(computed(rows, cut(rows, PADDED), PADDED)) < real / 0.95


def test_a_group_s_prompt_is_computed_once_where_the_budget_allows_it():
    rows = rows_of([(1000, [100] * 8), (30, [10] * 8)])
    parts = cut(rows, SHARED)
    assert sum(computed(rows, parts, SHARED)) == 1000 + 800 + 30 + 80
    halves = cut(rows, SHARED, use_dynamic_bsz=True, ppo_max_token_len_per_gpu=1500)
    assert sum(computed(rows, halves, SHARED)) == 2 * 1000 + 800 + 30 + 80


def test_a_group_above_the_fastest_size_stays_whole_without_a_budget_of_the_configuration():
    rows = rows_of([(FASTEST_TOKENS, [100] * 8), (30, [10] * 2)])
    assert sorted(len(part) for part in cut(rows, SHARED)) == [2, 8]


def test_four_rows_of_five_tokens_need_four_micro_batches_of_eight_and_twelve_tokens_name_their_row():
    rows = rows_of([(2, [3]) for _ in range(4)])
    assert sorted(cut(rows, SHARED, use_dynamic_bsz=True, ppo_max_token_len_per_gpu=8)) == [[0], [1], [2], [3]]
    with pytest.raises(ProtocolError, match="12 tokens in row g0_0_0"):
        cut(rows_of([(2, [10])]), SHARED, use_dynamic_bsz=True, ppo_max_token_len_per_gpu=8)


def test_passes_without_a_gradient_have_a_budget_of_their_own():
    rows, sizes = rows_of([(20, [20]) for _ in range(8)]), {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 80}
    assert len(cut(rows, SHARED, **sizes)) == len(cut(rows, SHARED, training=False, **sizes)) == 4
    assert len(cut(rows, SHARED, training=False, log_prob_max_token_len_per_gpu=160, **sizes)) == 2
    assert len(cut(rows, SHARED, log_prob_max_token_len_per_gpu=160, **sizes)) == 4


@pytest.mark.parametrize("layout", [PADDED, PACKED, SHARED])
@pytest.mark.parametrize("sizes", [{}, {"ppo_micro_batch_size_per_gpu": 2}, {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 100}])
def test_a_rank_with_few_rows_runs_as_many_passes_as_the_busiest(layout, sizes):
    rows = rows_of([(20, [20, 30])])
    parts = cut(rows, layout, most=7, **sizes)
    assert len(parts) == 7 and sorted(i for part in parts for i in part) == [0, 1]
    assert rows.micro_batch([], "loss_mask", layout).computed_tokens == 2
    assert len(cut(Rows.none(["loss_mask"]), layout, most=7, **sizes)) == 7


def test_micro_batches_by_rows_keep_rows_of_one_prompt_together():
    rows = rows_of([(5, [3, 3]), (6, [3, 3])])
    mixed = plan_passes(Model(SHARED), rows, [0, 2, 1, 3], ActorConfig(ppo_micro_batch_size_per_gpu=2))
    assert mixed == [[0, 1], [2, 3]]

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import ProtocolError
from streamrl.learner.balance import (
    Prompt,
    balanced_partitions,
    computed_tokens,
    first_fit_decreasing,
    grouped_micro_batches,
    micro_batches,
    padded_micro_batches,
    shared_workload,
    workload,
)

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@pytest.mark.parametrize("equal_size", [False, True])
def test_balance_golden_a17(equal_size):
    lengths = [7, 9, 8, 8, 10, 12]
    parts = balanced_partitions(lengths, 2, equal_size)
    assert [sum(lengths[i] for i in part) for part in parts] == [27, 27]
    assert sorted(map(tuple, parts)) in ([(0, 2, 5), (1, 3, 4)], [(0, 3, 5), (1, 2, 4)])


def test_impossible_partitions_are_refused():
    with pytest.raises(ProtocolError, match="every part gets an item"):
        balanced_partitions([1], 2)
    with pytest.raises(ProtocolError, match="multiple of 2"):
        balanced_partitions([1, 2, 3], 2, equal_size=True)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 5), st.booleans())
def test_partitions_are_a_permutation(lengths, k, equal_size):
    lengths = lengths * k
    parts = balanced_partitions(lengths, k, equal_size)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    if equal_size:
        assert {len(part) for part in parts} == {len(lengths) // k}


def test_the_budget_holds_where_balance_alone_would_break_it():
    lengths = [32768] + [1024] * 64
    parts = micro_batches(lengths, max_tokens=49152)
    assert sorted(sum(lengths[i] for i in part) for part in parts) == [49152, 49152]
    assert [len(part) for part in parts if 0 in part] == [17]


def test_four_rows_of_five_need_four_bins_of_eight():
    assert len(micro_batches([5, 5, 5, 5], max_tokens=8)) == 4
    with pytest.raises(ProtocolError, match="12 tokens in row number 0"):
        first_fit_decreasing([12], 8)


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.integers(60, 200), st.integers(0, 12), st.sampled_from([micro_batches, padded_micro_batches]))
def test_micro_batches_keep_the_budget_and_every_row(lengths, budget, count, split):
    parts = split(lengths, max_tokens=budget, count=count)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert len(parts) >= count
    cost = (lambda part: len(part) * max(lengths[i] for i in part)) if split is padded_micro_batches else lambda part: sum(lengths[i] for i in part)
    assert all(cost(part) <= budget for part in parts if part)


def test_static_micro_batches_have_a_smaller_last_one_and_empty_fill():
    assert micro_batches([1] * 5, max_rows=2) == [[0, 1], [2, 3], [4]]
    assert micro_batches([], max_rows=2, count=2) == [[], []]
    assert [len(part) for part in padded_micro_batches([1] * 5, max_rows=2, count=4)] == [2, 2, 1, 0]


def test_the_largest_micro_batch_is_in_the_middle():
    sums = [sum(part) for part in ([length for length in part] for part in micro_batches([10, 8, 6, 4, 2], max_rows=1))]
    assert len(sums) == 5
    lengths = [40, 30, 20, 10]
    by_work = [sum(lengths[i] for i in part) for part in micro_batches(lengths, max_tokens=40, count=4)]
    assert by_work == [20, 40, 30, 10]


def test_mixed_lengths_waste_little():
    lengths = [17 + (i * 7919) % 600 for i in range(300)]
    parts = padded_micro_batches(lengths, max_tokens=16384)
    computed = sum(len(part) * max(lengths[i] for i in part) for part in parts)
    assert sum(lengths) / computed > 0.95


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40)), min_size=1, max_size=40), st.integers(80, 300), st.integers(0, 9))
def test_rows_that_share_prompts_keep_the_budget_that_counts_each_prompt_once(rows, budget, count):
    prompts = [Prompt(number, 3 + 8 * number) for number, _ in rows]
    lengths = [prompt.tokens + size for prompt, (_, size) in zip(prompts, rows, strict=True)]
    parts = grouped_micro_batches(lengths, prompts, max_tokens=budget, count=count)
    assert sorted(i for part in parts for i in part) == list(range(len(rows))) and len(parts) >= count
    assert all(computed_tokens(lengths, prompts, part) <= budget for part in parts)
    for prompt in set(prompts):
        members = [i for i in range(len(rows)) if prompts[i] == prompt]
        if computed_tokens(lengths, prompts, members) <= budget:
            assert sum(any(i in part for i in members) for part in parts) == 1, "a group that fits is not torn"


def test_a_prompt_is_counted_once():
    prompts, lengths = [Prompt("a", 100)] * 3 + [Prompt("b", 10)], [110, 120, 130, 15]
    assert computed_tokens(lengths, prompts, [0, 1, 2, 3]) == 100 + 10 + 20 + 30 + 10 + 5
    # attention: the prompt with itself once, then each response with itself and the prompt
    assert shared_workload(lengths, prompts, [0, 1], linear=0) == 100**2 + (110**2 - 100**2) + (120**2 - 100**2)
    assert shared_workload(lengths, prompts, [0, 3]) == workload(110) + workload(15)
    assert grouped_micro_batches(lengths, prompts, max_tokens=175) == [[0, 1, 2, 3]]
    assert sorted(grouped_micro_batches(lengths, prompts, max_tokens=174)) == [[0, 1, 2], [3]]


def test_one_prompt_may_exceed_what_is_fastest_but_not_with_others():
    prompts, lengths = [Prompt("a", 60)] * 4 + [Prompt("b", 5)] * 2, [90] * 4 + [10] * 2
    parts = grouped_micro_batches(lengths, prompts, max_tokens=100, max_group_tokens=200)
    assert sorted(parts) == [[0, 1, 2, 3], [4, 5]]

"""The order of an epoch, plain and mixed: exact shares, no repetition within a pass, a pure function."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.data.order import epoch_order, prompt_order, shares

mixtures = st.lists(st.tuples(st.integers(1, 12), st.floats(0.05, 20)), min_size=1, max_size=4)


def source_of(sizes, number):
    return next(source for source in range(len(sizes)) if number < sum(sizes[: source + 1]))


def test_without_weights_files_are_concatenated():
    assert prompt_order([3, 4], None, shuffle=False, seed=1, epoch=5) == list(range(7))
    assert prompt_order([3, 4], None, shuffle=True, seed=1, epoch=5) == epoch_order(7, shuffle=True, seed=1, epoch=5)


@pytest.mark.parametrize(
    ("total", "weights", "expected"),
    [(10, [1, 1, 1], [4, 3, 3]), (10, [0.7, 0.3], [7, 3]), (10, [70, 30], [7, 3]), (7, [1], [7]), (5, [1, 9], [1, 4]), (3, [1, 1000], [0, 3])],
)
def test_shares_are_those_of_the_largest_remainder(total, weights, expected):
    assert shares(total, weights) == expected


@given(st.integers(0, 10_000), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6))
def test_shares_add_up_and_miss_the_exact_one_by_less_than_a_row(total, weights):
    counts = shares(total, weights)
    assert sum(counts) == total
    assert all(abs(count - total * weight / sum(weights)) < 1 + 1e-6 for count, weight in zip(counts, weights, strict=True))


@settings(deadline=None)
@given(mixtures, st.booleans(), st.integers(0, 2**31), st.integers(1, 5))
def test_each_epoch_keeps_the_shares_and_each_pass_holds_every_row_once(mixture, shuffle, seed, num_epochs):
    sizes, weights = [size for size, _ in mixture], [weight for _, weight in mixture]
    epochs = [prompt_order(sizes, weights, shuffle=shuffle, seed=seed, epoch=epoch) for epoch in range(num_epochs)]
    for order in epochs:
        counted = Counter(source_of(sizes, number) for number in order)
        assert [counted[source] for source in range(len(sizes))] == shares(sum(sizes), weights)
    taken = [number for order in epochs for number in order]
    for source, size in enumerate(sizes):
        stream = [number for number in taken if source_of(sizes, number) == source]
        for start in range(0, len(stream), size):
            one_pass = stream[start : start + size]
            assert len(set(one_pass)) == len(one_pass), "a row came twice within a pass of its file"


@settings(deadline=None)
@given(mixtures, st.booleans(), st.integers(0, 2**31), st.integers(0, 50))
def test_an_epoch_depends_on_nothing_that_came_before(mixture, shuffle, seed, epoch):
    sizes, weights = [size for size, _ in mixture], [weight for _, weight in mixture]
    first = prompt_order(sizes, weights, shuffle=shuffle, seed=seed, epoch=epoch)
    prompt_order(sizes, weights, shuffle=shuffle, seed=seed, epoch=epoch + 1)
    assert prompt_order(sizes, weights, shuffle=shuffle, seed=seed, epoch=epoch) == first


def test_without_shuffle_sources_alternate_evenly_and_rows_come_in_file_order():
    assert prompt_order([6, 2], [3, 1], shuffle=False, seed=0, epoch=0) == [0, 1, 6, 2, 3, 4, 7, 5]
    assert prompt_order([2, 6], [1, 1], shuffle=False, seed=0, epoch=1) == [0, 6, 1, 7, 0, 2, 1, 3]


def test_with_shuffle_epochs_passes_and_seeds_differ():
    orders = {tuple(prompt_order([20, 20], [1, 3], shuffle=True, seed=seed, epoch=epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9

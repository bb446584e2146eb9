"""Buffers of gets: used again when free, never while somebody can see them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.dataplane.buffers import SMALL_BYTES, Buffers
from tests.dataplane.store_world import one_store

SIZE = SMALL_BYTES


def address(view) -> int:
    return view.__array_interface__["data"][0]


@pytest.mark.parametrize(
    "hold",
    [
        lambda view: view,
        lambda view: view[10:20],
        lambda view: view[64:].view(np.int64).reshape(-1, 8)[3],
        lambda view: torch.from_numpy(view[:8].view(np.float32)).view(1, 2)[0, 1:],
        lambda view: memoryview(view[3:5]),
        lambda view: torch.nested.nested_tensor_from_jagged(torch.from_numpy(view), torch.tensor([0, 3, SIZE])).unbind()[1],
    ],
    ids=["itself", "slice", "deep view", "tensor view", "memoryview", "row of a nested tensor"],
)
def test_a_block_is_given_out_again_only_when_no_view_of_it_is_left(hold):
    buffers = Buffers()
    view = buffers.take(SIZE)
    first, held = address(view), hold(view)
    del view
    other = buffers.take(SIZE)
    assert address(other) != first
    del held, other
    assert first in {address(view) for view in [buffers.take(SIZE), buffers.take(SIZE)]}


def test_small_reads_and_sizes_far_apart_share_nothing():
    buffers = Buffers()
    assert not (buffers.take(SIZE - 1) is None or buffers._blocks)
    large = address(buffers.take(SIZE * 8))
    assert address(buffers.take(SIZE)) != large and address(buffers.take(SIZE * 7)) == large


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=30))
def test_what_is_kept_is_bounded_and_held_bytes_stay_as_they_were_written(takes):
    buffers, held = Buffers(6 * SIZE), []
    for number, (size, keep) in enumerate(takes):
        view = buffers.take(size * SIZE)
        view[:] = number
        if keep:
            held.append((number, view))
        del view
        assert sum(block.nbytes for block in buffers._blocks) <= 7.5 * SIZE
    assert all((view == number).all() for number, view in held)


def test_a_batch_that_is_still_held_keeps_its_values_while_others_are_read(tmp_path):
    with one_store(tmp_path, capacity_bytes=8 << 20) as (store, _):
        values = [np.full(SIZE, i) for i in range(3)]
        for i in range(3):
            store.kv_batch_put([f"k{i}"], "p", {"x": [values[i]]})
        first = store.kv_batch_get(["k0"], "p")["x"]
        row = store.get_numpy(["k1"], "p")["x"][0]
        for _ in range(5):
            assert store.get_numpy(["k2"], "p")["x"][0][-1] == 2
        assert (first.values() == 0).all() and (row == 1).all()


def test_columns_of_the_same_lengths_can_be_combined_elementwise(tmp_path):
    with one_store(tmp_path) as (store, _):
        store.kv_batch_put(["a", "b"], "p", {"x": [np.arange(3), np.arange(2)], "y": [np.ones(3), np.ones(2)]})
        batch = store.kv_batch_get(["b", "a"], "p")
        assert [row.tolist() for row in (batch["x"] * batch["y"]).unbind()] == [[0, 1], [0, 1, 2]]

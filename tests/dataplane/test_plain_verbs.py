"""Plain verbs that run in their caller's thread, beside others and beside the async verbs of the same client."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from streamrl.dataplane import jagged
from streamrl.errors import ProtocolError, StoreFull
from tests.dataplane.store_world import store_in_thread


def test_threads_and_coroutines_share_segments_and_no_put_is_lost_or_overwritten(tmp_path):
    with store_in_thread(tmp_path, capacity_bytes=4 << 20) as (store, index):

        def put(number):
            value = np.full(50 + number, number)
            if number % 3:
                store.kv_batch_put([f"k{number}"], "p", {"x": [value]})
            else:
                asyncio.run_coroutine_threadsafe(store.async_kv_batch_put([f"k{number}"], "p", {"x": [value]}), store._run._loop).result()
            return store.get_numpy([f"k{number}"], "p")["x"][0].tolist() == value.tolist()

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(put, range(600)))  # 0.8 MB through segments of 64 KiB
        rows = store.get_numpy([f"k{number}" for number in range(600)], "p")["x"]
        assert all((row == number).all() and row.size == 50 + number for number, row in enumerate(rows))
        assert len(index._pool.segments) > 10
        assert sum(segment.writer is not None for segment in index._pool.segments.values()) == 1  # full ones are sealed
        store.close()
        assert not any(segment.writer for segment in index._pool.segments.values())


def test_a_put_without_room_ends_in_storefull_and_the_next_one_works(tmp_path):
    with store_in_thread(tmp_path) as (store, _):
        with pytest.raises(StoreFull):
            store.kv_put("large", "p", {"x": np.zeros(2 << 20, np.uint8)})
        store.kv_put("k", "p", {"x": np.arange(3)})
        assert store.kv_list("p") == {"p": {"k": {}}} and store.kv_clear(["k"], "p") == 1


def test_plain_verbs_work_inside_another_loop_and_are_refused_on_the_stores_own(tmp_path):
    with store_in_thread(tmp_path) as (store, _):

        async def plain():
            store.kv_put("k", "p", {"x": 1})
            return store.get_numpy(["k"], "p")

        assert asyncio.run(plain()) == {"x": [1]}
        with pytest.raises(ProtocolError, match="async_"):
            asyncio.run_coroutine_threadsafe(plain(), store._run._loop).result()


@pytest.mark.parametrize("axis", [0, 1])
def test_a_jagged_tensor_is_what_the_public_constructor_makes(axis):
    values, offsets = torch.randn(6, 6), torch.tensor([0, 2, 2, 6])
    ours, theirs = jagged.jagged(values, offsets, axis), torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=axis + 1)
    assert ours.shape == theirs.shape and ours.stride() == theirs.stride() and ours.dtype == theirs.dtype and ours.layout == theirs.layout
    assert jagged.is_jagged(theirs) and jagged.ragged_axis(theirs) == axis
    assert all(torch.equal(a, b) for a, b in zip(ours.unbind(), theirs.unbind(), strict=True))
    assert torch.equal((ours * 2 + theirs).values(), values * 3) and torch.equal(ours.values(), values) and ours.offsets() is offsets
    leaf = values.clone().requires_grad_()
    (torch.nested.nested_tensor_from_jagged(leaf, offsets, jagged_dim=axis + 1) * ours).sum().backward()
    assert torch.allclose(leaf.grad, values)

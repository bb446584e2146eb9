"""Known fields through the store: their ragged axis is the declared one, whatever container they come in."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamrl.errors import DtypeClash, ProtocolError
from streamrl.protocol.fields import trajectory_columns
from streamrl.protocol.tensors import nested_from_list, rows_of
from tests.dataplane.store_world import one_store, trajectory

EXPERTS = [np.arange(n * 4, dtype=np.int16).reshape(n, 2, 2) for n in (3, 1)]


@pytest.fixture
def store(tmp_path):
    with one_store(tmp_path) as (client, _):
        yield client


@pytest.mark.parametrize(
    "column", [EXPERTS, [torch.from_numpy(x) for x in EXPERTS], nested_from_list([torch.from_numpy(x) for x in EXPERTS], 0)], ids=["numpy", "tensors", "nested"]
)
def test_routed_experts_are_ragged_along_the_tokens(store, column):
    store.kv_batch_put(["a", "b"], "p", {"routed_experts": column})
    back = store.kv_batch_get(["b", "a"], "p")["routed_experts"]
    assert back.dtype == torch.int16 and back._ragged_idx == 1 and back.shape[2:] == (2, 2)
    assert [row.tolist() for row in rows_of(back)] == [EXPERTS[1].tolist(), EXPERTS[0].tolist()]
    assert [row.tolist() for row in store.get_numpy(["a", "b"], "p")["routed_experts"]] == [x.tolist() for x in EXPERTS]


@pytest.mark.parametrize("size", [1, 2])
def test_equal_lengths_and_a_single_row_of_experts_stay_ragged(store, size):
    keys = [f"k{i}" for i in range(size)]
    store.kv_batch_put(keys, "p", {"routed_experts": np.stack([EXPERTS[0]] * size)})
    back = store.kv_batch_get(keys, "p")["routed_experts"]
    assert back.is_nested and back._ragged_idx == 1 and back.shape[0] == size and back.shape[2:] == (2, 2)


@pytest.mark.parametrize(
    ("name", "column", "error"),
    [
        ("routed_experts", nested_from_list([torch.zeros(2, 2, 3, dtype=torch.int16)], -1), DtypeClash),
        ("routed_experts", [np.zeros((2, 2, 2), np.int64)], DtypeClash),
        ("responses", np.arange(1), ProtocolError),
        ("position_ids", nested_from_list([torch.zeros(3, 2, dtype=torch.int64)], 0), DtypeClash),
    ],
)
def test_another_axis_or_dtype_is_refused_by_name(store, name, column, error):
    with pytest.raises(error, match=f"'{name}'.*, got .*; "):
        store.kv_batch_put(["a"], "p", {name: column})


def test_rows_with_multi_component_positions_come_back_as_b_3_j(store):
    rows = [trajectory("a", tokens=3, position_ids=[[0, 1, 2, 3, 4]] * 3), trajectory("b", tokens=3, position_ids=[[9] * 5, [8] * 5, [7] * 5])]
    store.kv_batch_put([str(row.key) for row in rows], "train", trajectory_columns(rows))
    back = store.kv_batch_get(["b_0_0", "a_0_0"], "train", ["position_ids", "uid"])
    assert back["position_ids"].shape[:2] == (2, 3) and back["position_ids"]._ragged_idx == 2 and back["uid"] == ["b", "a"]
    assert rows_of(back["position_ids"])[0].tolist() == [[9] * 5, [8] * 5, [7] * 5]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_rows_come_back_under_their_keys_in_any_order(store, tokens, data):
    rows = [trajectory(f"g{i}", tokens=n, row={"tools_kwargs": {"call": {"create_kwargs": {"n": i}}}}) for i, n in enumerate(tokens)]
    keys = [str(row.key) for row in rows]
    store.kv_batch_put(keys, "any", trajectory_columns(rows))
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=8))
    back = store.kv_batch_get([keys[i] for i in order], "any")
    assert [row.tolist() for row in rows_of(back["responses"])] == [rows[i].response_ids for i in order]
    assert back["tools_kwargs"] == [{"call": {"create_kwargs": {"n": i}}} for i in order] and back["uid"] == [f"g{i}" for i in order]
    store.kv_clear(keys, "any")

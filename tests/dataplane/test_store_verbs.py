"""The kv verbs: the strictness table, line by line."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from streamrl.errors import DtypeClash, MissingField, MissingKey, NotReady, ProtocolError, StaleWrite
from streamrl.protocol.meta import KVBatchMeta
from tests.dataplane.store_world import one_store, store_in_thread


@pytest.fixture(params=[one_store, store_in_thread], ids=["on its loop", "in the caller's thread"])
def store(request, tmp_path):
    with request.param(tmp_path) as (client, _):
        yield client


def nested(*rows, axis=1):
    values = torch.cat([torch.as_tensor(r) for r in rows], dim=axis - 1)
    lengths = [torch.as_tensor(r).shape[axis - 1] for r in rows]
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, *np.cumsum(lengths)]), jagged_dim=axis)


def rows_of(tensor):
    return [row.tolist() for row in tensor.unbind()]


def test_importing_the_dataplane_needs_no_torch():
    code = "import sys, streamrl.dataplane; sys.exit(any(m in sys.modules for m in ('torch', 'tensordict', 'ray')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_b070_scalars_keep_shape_and_dtype_one_by_one_and_in_a_batch(store):
    store.kv_put("a", "p", {"reward": torch.tensor(0.5), "size": torch.tensor(3)})
    store.kv_put("b", "p", {"reward": torch.tensor(1.0), "size": torch.tensor(7)})
    store.kv_batch_put(["c", "d"], "q", {"reward": torch.tensor([0.5, 1.0]), "size": np.asarray([3, 7])})
    for partition, keys in (("p", ["a", "b"]), ("q", ["c", "d"])):
        batch = store.kv_batch_get(keys, partition)
        assert batch["reward"].tolist() == [0.5, 1.0] and batch["size"].tolist() == [3, 7]
        assert batch["reward"].dtype == torch.float32 and batch["size"].dtype == torch.int64 and batch["size"].shape == (2,)


def test_a_get_returns_the_kind_that_was_put(store):
    dense = torch.arange(6.0).reshape(2, 3)
    store.kv_batch_put(["a", "b"], "p", {"dense": dense, "deep": torch.ones(2, 2, 2), "words": ["x", {"y": [1, None]}], "ragged": [np.arange(2), np.arange(3)]})
    batch = store.kv_batch_get(["b", "a"], "p")
    assert torch.equal(batch["dense"], dense[[1, 0]]) and batch["deep"].shape == (2, 2, 2)
    assert batch["words"] == [{"y": [1, None]}, "x"]
    assert rows_of(batch["ragged"]) == [[0, 1, 2], [0, 1]]


@pytest.mark.parametrize("size", [1, 2])
def test_equal_lengths_stay_ragged_along_the_same_axis(store, size):
    keys = [f"k{i}" for i in range(size)]
    flat = nested(*[torch.arange(4)] * size)
    last = nested(*[torch.arange(20).reshape(4, 5)] * size, axis=2)
    first = nested(*[torch.arange(20).reshape(4, 5)] * size, axis=1)
    store.kv_batch_put(keys, "p", TensorDict({"flat": flat, "last": last, "first": first, "list": nested(*[[1, 2]] * size)}, batch_size=[size]))
    batch = store.kv_batch_get(keys, "p")
    assert batch["flat"].is_nested and batch["flat"].shape[0] == size and batch["flat"]._ragged_idx == 1
    assert batch["last"]._ragged_idx == 2 and batch["last"].shape[1] == 4
    assert batch["first"]._ragged_idx == 1 and batch["first"].shape[2] == 5
    for name, want in (("flat", flat), ("last", last), ("first", first)):
        assert rows_of(batch[name]) == rows_of(want)


def test_multi_component_position_ids_keep_the_last_axis_ragged(store):
    rows = [np.arange(9).reshape(3, 3), np.arange(6).reshape(3, 2)]
    store.kv_batch_put(["a", "b"], "p", {"position_ids": rows})
    batch = store.kv_batch_get(["b", "a"], "p")
    assert batch["position_ids"].shape[1] == 3 and rows_of(batch["position_ids"]) == [rows[1].tolist(), rows[0].tolist()]
    assert [r.tolist() for r in store.get_numpy(["a", "b"], "p")["position_ids"]] == [r.tolist() for r in rows]


def test_zero_length_rows_are_legal(store):
    store.kv_batch_put(["a", "b", "c"], "p", {"x": [np.arange(2), np.arange(0), np.arange(1)]})
    assert rows_of(store.kv_batch_get(["a", "b", "c"], "p")["x"]) == [[0, 1], [], [0]]
    assert rows_of(store.kv_batch_get(["b"], "p")["x"]) == [[]]
    store.kv_put("lonely", "q", TensorDict({"x": nested(torch.zeros(0, dtype=torch.int64))}, batch_size=[1]))
    assert rows_of(store.kv_batch_get(["lonely", "lonely"], "q")["x"]) == [[], []]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.bool, torch.int32, torch.float8_e4m3fn])
def test_every_dtype_comes_back_bit_by_bit(store, dtype):
    values = torch.arange(6).reshape(2, 3).to(dtype)
    store.kv_batch_put(["a", "b"], "p", {"x": values, "s": values[:, 0].clone(), "r": [values[0], values[1, :1]]})
    batch = store.kv_batch_get(["a", "b"], "p")
    assert batch["x"].dtype == batch["r"].dtype == batch["s"].dtype == dtype
    assert torch.equal(batch["x"].view(torch.uint8), values.view(torch.uint8)) and torch.equal(
        batch["r"].unbind()[1].view(torch.uint8), values[1, :1].view(torch.uint8)
    )


def test_another_dtype_or_kind_is_refused_on_the_put_and_nothing_changes(store):
    store.kv_batch_put(["a"], "p", {"x": torch.tensor([1])}, [{"t": 1}])
    for wrong in (torch.tensor([0.5]), torch.tensor([1], dtype=torch.int32), torch.tensor([[1]]), ["1"], [np.arange(1)]):
        with pytest.raises(TypeError, match="'x'"):
            store.kv_batch_put(["b"], "p", {"y": torch.tensor([1]), "x": wrong}, [{"t": 2}])
    assert store.kv_list("p") == {"p": {"a": {"t": 1}}}
    store.kv_clear(["a"], "p")
    store.kv_batch_put(["b"], "p", {"x": torch.tensor([0.5])})  # no row of the old dtype lives


def test_known_fields_have_their_declared_dtype_and_kind_from_the_first_row(store):
    with pytest.raises(DtypeClash, match="ragged int64"):
        store.kv_batch_put(["a"], "p", {"responses": torch.zeros(1, 3, dtype=torch.int32)})
    with pytest.raises(DtypeClash, match="never cast"):
        store.kv_batch_put(["a"], "p", {"num_turns": [1.5]})
    store.kv_batch_put(["a", "b"], "p", {"responses": torch.zeros(2, 3, dtype=torch.int64), "num_turns": [1, 2]})
    batch = store.kv_batch_get(["a", "b"], "p")
    assert batch["responses"].is_nested and batch["num_turns"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda s: s.kv_put("k", "p"), ValueError),
        (lambda s: s.kv_put("k", "p", [1]), ValueError),
        (lambda s: s.kv_put("k", "p", {"x": nested([1], [2])}), ValueError),
        (lambda s: s.kv_put("", "p", {"x": 1}), ValueError),
        (lambda s: s.kv_batch_put(["k"], "p"), ValueError),
        (lambda s: s.kv_batch_put(["k"], "p", {}), ValueError),
        (lambda s: s.kv_batch_put("k", "p", {"x": [1]}), ValueError),
        (lambda s: s.kv_batch_put(["k", "k"], "p", {"x": [1, 2]}), ValueError),
        (lambda s: s.kv_batch_put(["k"], "p", {"x": [1, 2]}), ValueError),
        (lambda s: s.kv_batch_put(["k"], "p", {"x": torch.zeros(2)}), ValueError),
        (lambda s: s.kv_batch_put(["k"], "p", TensorDict({"x": torch.zeros(2)}, batch_size=[2])), ValueError),
        (lambda s: s.kv_batch_put(["k"], "p", None, [{}, {}]), ValueError),
        (lambda s: s.kv_batch_put(["k"], "p", {"x": [1]}, []), ValueError),
        (lambda s: s.kv_batch_put(["k"], "p", None, [{"t": [1]}]), ValueError),
        (lambda s: s.kv_batch_put(["k"], "p", None, [{"t": {}}]), ValueError),
        (lambda s: s.kv_batch_put(["k", "l"], "p", {"x": [np.zeros((2, 3)), np.zeros((3, 2))]}), ValueError),
        (lambda s: s.kv_batch_put(["k", "l"], "p", {"x": [np.zeros(2), np.zeros((2, 2))]}), ValueError),
        (lambda s: s.kv_batch_put(["k", "l"], "p", {"x": [np.zeros(2), np.zeros(2, np.int32)]}), TypeError),
        (lambda s: s.kv_batch_put(["k"], "p", {"x": np.asarray(["text"])}), TypeError),
        (lambda s: s.kv_batch_put(["k"], "p", {"x": 1}), TypeError),
        (lambda s: s.kv_batch_put(["k"], "p", {"x": [{"deep": [object()]}]}), TypeError),
        (lambda s: s.kv_batch_put(["k"], "p", {"x": [(1, 2)]}), TypeError),
        (lambda s: s.kv_batch_put(["k"], "p", {"x": [{"v": np.float64(1)}]}), TypeError),
        (lambda s: s.kv_batch_put(["k"], "p", {"x": [1 << 70]}), TypeError),
    ],
)
def test_a_refused_put_changes_no_key_row_or_tag(store, call, error):
    with pytest.raises(error):
        call(store)
    assert store.kv_list() == {}
    with pytest.raises(MissingKey):
        store.kv_batch_get(["k"], "p")


def test_an_object_that_cannot_be_stored_is_named_by_its_path(store):
    with pytest.raises(DtypeClash, match=r"x\[0\]\.deep\[1\]"):
        store.kv_batch_put(["k"], "p", {"x": [{"deep": [1, object()]}]})


def test_objects_come_back_equal_with_arrays_inside(store):
    values = [None, True, -3, 2.5, "text", b"raw", [1, [None]], {"a": {"b": 1}, 5: "five"}]
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    keys = [f"k{i}" for i in range(len(values) + 1)]
    store.kv_batch_put(keys, "p", {"x": [*values, {"array": array}]})
    got = store.get_numpy(keys, "p")["x"]
    assert got[:-1] == values and np.array_equal(got[-1]["array"], array) and got[-1]["array"].dtype == np.float32
    assert store.kv_batch_get(keys[:-1], "p").get("x").tolist() == values


def test_upserts_touch_only_the_given_columns_and_tags_merge(store):
    store.kv_batch_put(["a", "b"], "p", {"x": [np.arange(3), np.arange(1)], "y": torch.tensor([1, 2])}, [{"s": 1, "t": 1}, {"s": 2}])
    store.kv_batch_put(["b"], "p", {"x": [np.arange(5)]}, [{"t": 9}])  # another length is legal
    batch = store.kv_batch_get(["a", "b"], "p")
    assert rows_of(batch["x"]) == [[0, 1, 2], [0, 1, 2, 3, 4]] and batch["y"].tolist() == [1, 2]
    assert store.kv_list("p")["p"] == {"a": {"s": 1, "t": 1}, "b": {"s": 2, "t": 9}}


def test_gets_name_every_missing_key_field_and_row(store):
    store.kv_batch_put(["a", "b"], "p", {"x": torch.tensor([1, 2])})
    store.kv_batch_put(["a"], "p", {"y": torch.tensor([1])})
    store.kv_batch_put(["tagged"], "p", None, [{"t": 1}])
    with pytest.raises(KeyError, match=r"'n1', 'n2'"):
        store.kv_batch_get(["n2", "a", "n1"], "p")
    with pytest.raises(MissingKey, match="nowhere"):
        store.kv_batch_get(["a"], "nowhere")
    with pytest.raises(MissingField, match=r"'y'.*'b'"):
        store.kv_batch_get(["a", "b"], "p", ["x", "y"])
    with pytest.raises(KeyError, match="zzz"):
        store.kv_batch_get_by_meta(KVBatchMeta("p", ["a"], [{}], ["zzz"]))
    with pytest.raises(NotReady, match="tagged"):
        store.kv_batch_get(["a", "tagged"], "p")
    assert list(store.kv_batch_get(["a", "b"], "p").keys()) == ["x"]
    assert store.kv_batch_get(["b", "a", "b"], "p")["x"].tolist() == [2, 1, 2]
    assert store.kv_list("nowhere") == {}


def test_optional_reads_say_what_is_present(store):
    store.kv_batch_put(["a", "b"], "p", {"x": torch.tensor([1, 2])})
    store.kv_batch_put(["b"], "p", {"r": [np.arange(2)], "o": ["here"]})
    batch = store.kv_batch_get(["a", "b"], "p", ["x", "r", "o", "never"], optional=True)
    assert batch["x"].tolist() == [1, 2] and rows_of(batch["r"]) == [[], [0, 1]] and batch["o"] == [None, "here"]
    present = batch["presence"]
    assert {name: present[name].tolist() for name in present.keys()} == {"x": [True, True], "r": [False, True], "o": [False, True], "never": [False, False]}
    with pytest.raises(MissingKey):
        store.kv_batch_get(["ghost"], "p", ["x"], optional=True)


def test_clear_frees_rows_ignores_unknown_keys_and_counts(store):
    store.kv_batch_put(["a", "b"], "p", {"x": torch.tensor([1, 2])}, [{}, {}])
    assert store.kv_clear(["a", "ghost"], "p") == 1 and store.kv_clear(["a"], "p") == 0 and store.kv_clear(["a"], "q") == 0
    assert store.kv_list() == {"p": {"b": {}}}
    store.kv_put("a", "p", {"x": torch.tensor(3)})
    assert store.kv_batch_get(["a"], "p")["x"].tolist() == [3]


def test_rows_of_a_group_refuse_the_past_and_a_new_attempt_replaces_them(store):
    store.kv_batch_put(["u_0_0"], "p", {"x": [1], "y": [1]}, [{"attempt": 1}])
    store.kv_batch_put(["u_0_0"], "p", {"x": [2]}, [{"attempt": 2}])
    assert store.get_numpy(["u_0_0"], "p") == {"x": [2]}  # no column of attempt 1 is left
    with pytest.raises(StaleWrite):
        store.kv_batch_put(["u_0_0"], "p", {"x": [3]}, [{"attempt": 1}])
    store.kv_clear(["u_0_0"], "p")
    for late in ({"attempt": 2}, {"note": 1}):
        with pytest.raises(StaleWrite):
            store.kv_batch_put(["u_0_0"], "p", None, [late])
    assert store.kv_list("p") == {}
    store.kv_batch_put(["u_0_0"], "p", {"x": [4]}, [{"attempt": 3}])
    assert store.get_numpy(["u_0_0"], "p") == {"x": [4]}


def test_a_write_back_adds_columns_and_must_fit_the_rows_lengths(store):
    keys = ["u_0_0", "u_1_0"]
    store.kv_batch_put(keys, "p", {"responses": [np.arange(3), np.arange(2)]}, [{"attempt": 1, "response_len": 3}, {"attempt": 1, "response_len": 2}])
    store.kv_batch_put(keys, "p", {"old_log_probs": [np.zeros(3, np.float32), np.ones(2, np.float32)]})
    with pytest.raises(ProtocolError, match=r"response_len = 2.*u_1_0.*3"):
        store.kv_batch_put(keys, "p", {"advantages": [np.zeros(3, np.float32), np.ones(3, np.float32)]})
    batch = store.kv_batch_get(keys, "p")
    assert set(batch.keys()) == {"responses", "old_log_probs"} and rows_of(batch["old_log_probs"]) == [[0, 0, 0], [1, 1]]


def test_fifty_concurrent_tag_puts_on_one_key_all_survive(tmp_path):
    async def main():
        with one_store(tmp_path) as (store, _):
            await asyncio.gather(*(store.async_kv_put("k", "p", tag={f"t{i}": i}) for i in range(50)))
            assert (await store.async_kv_list("p"))["p"]["k"] == {f"t{i}": i for i in range(50)}

    asyncio.run(main())


def test_concurrent_puts_of_different_columns_all_survive(tmp_path):
    async def main():
        with one_store(tmp_path) as (store, _):
            await asyncio.gather(*(store.async_kv_batch_put(["a", "b"], "p", {f"c{i}": torch.full((2, 7), i)}) for i in range(50)))
            batch = await store.async_kv_batch_get(["a", "b"], "p")
            assert all((batch[f"c{i}"] == i).all() for i in range(50))

    asyncio.run(main())


def test_b076_every_column_of_a_filtered_batch_has_the_kept_rows(store):
    keys = [f"k{i}" for i in range(6)]
    store.kv_batch_put(keys, "p", {"rewards": torch.arange(6.0), "x": [np.arange(i) for i in range(6)]}, [{"n": i} for i in range(6)])
    kept = KVBatchMeta("p", keys, [{"n": i} for i in range(6)], ["rewards", "x"]).select_keys([keys[i] for i in (0, 1, 4, 5)])
    batch = store.kv_batch_get_by_meta(kept)
    assert batch["rewards"].tolist() == [0, 1, 4, 5] and [len(row) for row in rows_of(batch["x"])] == [0, 1, 4, 5]
    with pytest.raises(ProtocolError, match="got 6 values of 'rewards' for 4 keys"):
        store.kv_batch_put(kept.keys, "p", {"rewards": torch.arange(6.0)})
    assert store.kv_batch_get(keys, "p", ["rewards"])["rewards"].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_plain_verb_on_the_stores_own_loop_is_refused_instead_of_hanging(tmp_path):
    async def main():
        with one_store(tmp_path) as (store, _):
            await store.async_kv_put("k", "p", {"x": 1})
            with pytest.raises(ProtocolError, match="async_"):
                store.kv_put("k", "p", {"x": 2})
            await asyncio.to_thread(store.kv_put, "k", "p", {"x": 3})
            assert await store.async_get_numpy(["k"], "p") == {"x": [3]}

    asyncio.run(main())


def test_a_stack_of_a_tensordict_and_a_value_shared_by_all_rows_become_object_columns(store):
    data = TensorDict({"s": NonTensorStack("a", {"b": 1})}, batch_size=[2])
    data.set_non_tensor("shared", "same")
    store.kv_batch_put(["a", "b"], "p", data)
    assert store.get_numpy(["a", "b"], "p") == {"s": ["a", {"b": 1}], "shared": ["same", "same"]}


def test_read_values_are_copies(store):
    source = np.arange(3)
    store.kv_batch_put(["a"], "p", {"x": [source]})
    source[:] = 9
    one = store.kv_batch_get(["a"], "p")["x"]
    one.values()[:] = 7
    assert store.get_numpy(["a"], "p")["x"][0].tolist() == [0, 1, 2]

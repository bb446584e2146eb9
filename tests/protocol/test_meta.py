import logging

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import ProtocolError
from streamrl.protocol import KVBatchMeta
from streamrl.protocol.meta import even_parts
from tests.protocol.batches import quick


def make(size, partition="train", first=0, **kw):
    names = range(first, first + size)
    return KVBatchMeta(partition, [f"A_{i}_0" for i in names], [{"seq_len": i} for i in names], **kw)


def in_step(meta):
    return all(key == f"A_{tag['seq_len']}_0" for key, tag in zip(meta.keys, meta.tags, strict=True))


def test_one_tag_per_key():
    with pytest.raises(ValueError, match="1 keys and 0 tags"):
        KVBatchMeta("train", ["A_0_0"], [])


def test_keys_and_fields_are_distinct():
    with pytest.raises(ValueError, match="A_0_0"):
        KVBatchMeta("train", ["A_0_0", "A_0_0"], [{}, {}])
    with pytest.raises(ValueError, match="prompts"):
        make(1, fields=["prompts", "prompts"])


@pytest.mark.parametrize("value", [[1], {"a": 1}, (1,), np.int64(3), np.float64(1.0)])
def test_tag_values_are_plain(value):
    with pytest.raises(ProtocolError, match=r"tag values are None.*'A_0_0'"):
        KVBatchMeta("train", ["A_0_0"], [{"x": value}])


def test_every_plain_tag_value_is_taken_and_survives_the_wire():
    tag = {"a": None, "b": True, "c": 3, "d": 0.5, "e": "x", "f": b"y"}
    meta = KVBatchMeta("train", ["A_0_0"], [tag])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(meta), type=KVBatchMeta).tags == [tag]


def test_tags_and_extra_info_are_copies():
    tags, info = [{"x": 1}], {"deep": [1]}
    meta = KVBatchMeta("train", ["A_0_0"], tags, extra_info=info)
    tags[0]["x"] = 2
    info["deep"].append(2)
    assert meta.tags == [{"x": 1}]
    assert meta.extra_info == {"deep": [1]}


def test_select_keys_keeps_the_requested_order():
    meta = make(4).select_keys(["A_3_0", "A_1_0"])
    assert meta.keys == ["A_3_0", "A_1_0"] and in_step(meta)


@quick
@given(st.integers(0, 12), st.data())
def test_selected_and_reordered_rows_keep_their_tags(size, data):
    order = data.draw(st.permutations(list(range(size))))
    meta = make(size, fields=["prompts"], extra_info={"a": [1]})
    some = meta.select_keys([meta.keys[i] for i in order[: size // 2]])
    assert [tag["seq_len"] for tag in some.tags] == order[: size // 2] and in_step(some) and some.fields == ["prompts"] and some.extra_info == {"a": [1]}
    meta.reorder(np.array(order, np.int64))
    assert [tag["seq_len"] for tag in meta.tags] == order and in_step(meta)


def test_no_operation_shares_a_tag_with_its_source():
    meta = make(4, extra_info={"deep": [1]})
    copies = [meta.select_keys(["A_1_0"]), meta.chunk(2)[0], KVBatchMeta.concat(meta.chunk(2)), meta.with_fields(["x"])]
    for part in copies:
        for tag in part.tags:
            tag["seq_len"] = -1
        part.extra_info["deep"].append(2)
    assert meta == make(4, extra_info={"deep": [1]})


def test_select_keys_names_unknown_keys_and_refuses_duplicates():
    for kind in (RuntimeError, KeyError, ValueError):
        with pytest.raises(kind, match="B_0_0"):
            make(2).select_keys(["A_0_0", "B_0_0"])
    with pytest.raises(ValueError, match="A_0_0"):
        make(2).select_keys(["A_0_0", "A_0_0"])


def test_reorder_moves_keys_and_tags_together_in_place():
    meta = make(3)
    assert meta.reorder([2, 0, 1]) is None
    assert meta.keys == ["A_2_0", "A_0_0", "A_1_0"] and in_step(meta)


@pytest.mark.parametrize(("indices", "error"), [([0, 1], ValueError), ([0, 1, 1], ValueError), ([0, 1, 3], IndexError), ([0, 1, -1], IndexError)])
def test_reorder_takes_a_permutation_only(indices, error):
    meta = make(3)
    with pytest.raises(error):
        meta.reorder(indices)
    assert meta.keys == make(3).keys


def test_chunk_sizes_of_ten_in_four_and_nine_in_six():
    assert [len(part) for part in make(10).chunk(4)] == [3, 3, 2, 2]
    assert [len(part) for part in make(9).chunk(6)] == [2, 2, 2, 1, 1, 1]


def test_chunk_of_fewer_keys_than_parts_warns_and_gives_empty_parts(caplog):
    with caplog.at_level(logging.WARNING):
        assert [len(part) for part in make(2).chunk(4)] == [1, 1, 0, 0]
    assert "2 parts empty" in caplog.text


def test_chunk_needs_a_part():
    with pytest.raises(ValueError, match="got 0"):
        make(2).chunk(0)


def test_chunks_do_not_share_fields_or_extra_info():
    meta = make(2, fields=["prompts"], extra_info={"a": [1]})
    one, two = meta.chunk(2)
    one.fields.append("x")
    one.extra_info["a"].append(2)
    assert two.fields == meta.fields == ["prompts"]
    assert two.extra_info == meta.extra_info == {"a": [1]}


@quick
@given(st.integers(0, 40), st.integers(1, 12))
def test_chunk_then_concat_is_the_same_batch(size, chunks):
    parts = make(size, extra_info={"step": 1}).chunk(chunks)
    assert len(parts) == chunks
    assert max(len(p) for p in parts) - min(len(p) for p in parts) <= 1
    back = KVBatchMeta.concat(parts)
    assert back.keys == make(size).keys and back.tags == make(size).tags


@quick
@given(st.integers(0, 100), st.integers(1, 20))
def test_even_parts_cover_every_row_once_with_earlier_parts_bigger(size, chunks):
    parts = even_parts(size, chunks)
    assert [i for part in parts for i in part] == list(range(size))
    assert [len(p) for p in parts] == sorted((len(p) for p in parts), reverse=True)


def test_concat_of_nothing_warns_and_is_empty(caplog):
    with caplog.at_level(logging.WARNING):
        empty = KVBatchMeta.concat([])
    assert len(empty) == 0 and empty.extra_info == {} and caplog.records


def test_concat_skips_empty_parts():
    other = KVBatchMeta("val", extra_info={"x": 1}, fields=["values"])
    assert KVBatchMeta.concat([other, make(2, fields=["prompts"])]).fields == ["prompts"]


@pytest.mark.parametrize(
    "other",
    [
        make(2, first=5, partition="val"),
        make(2, first=5, fields=["responses"]),
        make(2, first=5, extra_info={"a": np.array([1, 3])}),
        make(2, first=1),
    ],
)
def test_concat_refuses_parts_that_do_not_fit(other):
    with pytest.raises(ValueError):
        KVBatchMeta.concat([make(2, fields=["prompts"], extra_info={"a": np.array([1, 2])}), other])


def test_concat_unites_extra_info_with_a_warning(caplog):
    parts = [make(1, extra_info={"a": np.array([1, 2])}), make(1, first=1, extra_info={"a": np.array([1, 2]), "b": 2})]
    with caplog.at_level(logging.WARNING):
        merged = KVBatchMeta.concat(parts)
    assert set(merged.extra_info) == {"a", "b"} and "union" in caplog.text


def test_with_fields_is_a_copy_and_leaves_unknown_names_to_the_store():
    meta = make(2)
    chosen = meta.with_fields(["nowhere"])
    assert chosen.fields == ["nowhere"] and meta.fields is None
    assert chosen.with_fields(None).fields is None
    with pytest.raises(ValueError):
        meta.with_fields(["a", "a"])


def test_extra_info_is_a_dict_after_every_operation():
    meta = make(4)
    results = [meta, meta.select_keys(["A_1_0"]), *meta.chunk(2), meta.with_fields(["x"]), KVBatchMeta.concat(meta.chunk(2)), KVBatchMeta.concat([])]
    meta.reorder([3, 2, 1, 0])
    assert all(result.extra_info == {} for result in results)

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.protocol import BatchMeta
from streamrl.protocol.batch_meta import FieldSchema
from tests.protocol.batches import quick


def make(size, first=0, partition="train", status=1, **kw):
    schema = {
        "responses": FieldSchema("int64", (size, None), 1, per_sample_shapes=[(i + first,) for i in range(size)]),
        "score": FieldSchema("float32", (size,), is_scalar=True),
        "uid": FieldSchema("object", (size,), is_non_tensor=True),
    }
    tags = [{"seq_len": i + first} for i in range(size)]
    return BatchMeta(list(range(first, first + size)), [partition] * size, schema, [status] * size, custom_meta=tags, **kw)


def in_step(meta):
    for i, index in enumerate(meta.global_indexes):
        sample = meta.per_sample(i)
        assert sample.global_index == sample.tag["seq_len"] == sample.shapes["responses"][0] == index
    assert all(schema.shape[0] == len(meta) for schema in meta.field_schema.values())
    return meta.global_indexes


def test_ready_means_rows_and_all_produced():
    assert make(2).is_ready and not make(0).is_ready and not make(2, status=0).is_ready and not BatchMeta().is_ready
    assert BatchMeta([1], ["train"]).production_status == [0]


def test_field_names_are_sorted_and_scalars_have_shape_b():
    assert make(2).field_names == ["responses", "score", "uid"]
    assert make(2).field_schema["score"].shape == (2,) and make(2).per_sample(0).shapes["score"] == ()
    with pytest.raises(ValueError, match="'s'"):
        BatchMeta([0], ["train"], {"s": FieldSchema("float32", (1, 1), is_scalar=True)})


@pytest.mark.parametrize(
    "arguments",
    [
        {"partition_ids": []},
        {"production_status": [1, 1]},
        {"custom_meta": []},
        {"backend_meta": [{}, {}]},
        {"field_schema": {"x": FieldSchema("int64", (2,))}},
        {"field_schema": {"x": FieldSchema("int64", (1, None), 1, per_sample_shapes=[])}},
    ],
)
def test_lengths_agree(arguments):
    with pytest.raises(ValueError, match="one entry per row"):
        BatchMeta(**{"global_indexes": [0], "partition_ids": ["train"], **arguments})


def test_indexes_are_distinct():
    with pytest.raises(ValueError):
        BatchMeta([1, 1], ["train", "train"])


@quick
@given(st.integers(0, 12), st.integers(1, 6))
def test_chunk_then_concat_is_the_same_batch(size, chunks):
    parts = make(size, extra_info={"a": 1}).chunk(chunks)
    assert len(parts) == chunks and [i for part in parts for i in in_step(part)] == list(range(size))
    back = BatchMeta.concat(parts)
    assert back == make(size, extra_info={"a": 1}) or size == 0


def test_chunk_errors_and_sizes(caplog):
    assert [len(part) for part in make(10).chunk(4)] == [3, 3, 2, 2]
    assert [len(part) for part in make(2).chunk(4)] == [1, 1, 0, 0] and "empty" in caplog.text
    with pytest.raises(ValueError):
        make(2).chunk(0)


def test_chunks_by_partition_keep_the_order():
    meta = BatchMeta([3, 1, 2], ["val", "train", "val"])
    assert [(p.partition_ids[0], p.global_indexes) for p in meta.chunk_by_partition()] == [("val", [3, 2]), ("train", [1])]


def test_union_lets_the_other_win_and_ands_the_status():
    left = make(2, extra_info={"a": 1})
    right = BatchMeta([0, 1], ["train"] * 2, {"score": FieldSchema("float64", (2,), is_scalar=True), "new": FieldSchema("int64", (2, 3))}, [1, 0], {"b": 2})
    both = left.union(right)
    assert both.field_names == ["new", "responses", "score", "uid"] and both.field_schema["score"].dtype == "float64"
    assert both.production_status == [1, 0] and both.extra_info == {"a": 1, "b": 2} and both.custom_meta == left.custom_meta
    for other in (make(2, first=1), make(2, partition="val"), make(3)):
        with pytest.raises(ValueError):
            left.union(other)


@pytest.mark.parametrize(
    "other",
    [
        make(2, first=5).select_fields(["score"]),
        msgspec.structs.replace(make(2, first=5), field_schema=make(2, first=5).field_schema | {"score": FieldSchema("int64", (2,), is_scalar=True)}),
        make(2, first=5, extra_info={"a": np.zeros(1)}),
        make(2, first=1),
    ],
)
def test_concat_refuses_parts_that_do_not_fit(other):
    with pytest.raises(ValueError):
        BatchMeta.concat([make(2), other])


def test_concat_of_nothing_is_empty(caplog):
    assert len(BatchMeta.concat([])) == 0 and caplog.records


@quick
@given(st.permutations(list(range(5))))
def test_reorder_moves_everything_in_place(order):
    meta = make(5)
    meta.reorder(order)
    assert in_step(meta) == list(order)


@pytest.mark.parametrize("order", [[0, 1], [0, 0, 1], [0, 1, 3]])
def test_reorder_takes_a_permutation(order):
    with pytest.raises(ValueError):
        make(3).reorder(order)


def test_select_fields_names_unknown_ones():
    assert make(2).select_fields(["uid"]).field_names == ["uid"]
    with pytest.raises(KeyError, match="nope"):
        make(2).select_fields(["uid", "nope"])


def test_a_sample_is_read_only():
    sample = make(2).per_sample(1)
    with pytest.raises(TypeError):
        sample.tag["x"] = 1
    with pytest.raises(AttributeError):
        sample.global_index = 3
    for row in (2, -1):
        with pytest.raises(IndexError):
            make(2).per_sample(row)


def test_it_travels_as_msgpack():
    meta = make(3, extra_info={"a": [1]})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(meta), type=BatchMeta) == meta

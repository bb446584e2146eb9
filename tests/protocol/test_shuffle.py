"""No row move mixes rows: after any sequence of moves each row still has its own uid, ground truth, tool arguments, tokens and tags.

Row i of every container is marked with i in each of its columns; a plain list of numbers says where each row should be.
"""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.protocol import BatchMeta, DataProto, KVBatchMeta, codec
from streamrl.protocol import tensors as T
from streamrl.protocol.batch_meta import FieldSchema
from streamrl.protocol.dataproto import DataProtoConfig, pad_dataproto_to_divisor, unpad_dataproto

MOVES = st.lists(st.tuples(st.sampled_from(["reorder", "cut", "repeat", "tile", "pad", "select", "wire"]), st.integers(0, 2**16)), max_size=8)
many = settings(max_examples=60, deadline=None)


def columns(size):
    """Columns of every kind; the lengths repeat, are equal for some rows and 0 for others."""
    lengths = [i % 4 for i in range(size)]
    objects = {
        "uid": [f"u{i}" for i in range(size)],
        "reward_model": [{"style": "rule", "ground_truth": f"answer {i}"} for i in range(size)],
        "tools_kwargs": [{"search": {"create_kwargs": {"row": i, "same": ["x", "y"]}}} for i in range(size)],
    }
    tensors = {
        "responses": T.nested_from_list([torch.full((n,), i) for i, n in enumerate(lengths)]),
        "rm_scores": T.nested_from_list([torch.full((n + 1,), i, dtype=torch.float32) for i, n in enumerate(lengths)]),
        "position_ids": T.nested_from_list([torch.full((3, n), i) for i, n in enumerate(lengths)]),
        "dense": torch.arange(size)[:, None].expand(size, 2).contiguous(),
        "row": torch.arange(size),
    }
    return tensors, objects


def check_objects(row, uid, reward_model, tools_kwargs):
    assert uid == f"u{row}" and reward_model["ground_truth"] == f"answer {row}" and tools_kwargs["search"]["create_kwargs"]["row"] == row


def check_tensors(rows, get):
    for name, extra in (("responses", 0), ("rm_scores", 1), ("position_ids", 0)):
        for row, value in zip(rows, T.rows_of(get(name)), strict=True):
            assert value.shape[-1] == row % 4 + extra and bool((value == row).all()), name
    assert get("dense").tolist() == [[row, row] for row in rows]


class Padded:
    """A DataProto."""

    def __init__(self, size):
        tensors, objects = columns(size)
        self.data = DataProto.from_dict(tensors, objects, {DataProtoConfig.auto_padding_key: True})

    def reorder(self, order):
        self.data.reorder(order)

    def cut(self, parts):
        self.data = DataProto.concat(self.data.chunk(parts))

    def repeat(self, times, interleave):
        self.data = self.data.repeat(times, interleave)

    def pad(self, divisor):
        padded, pad = pad_dataproto_to_divisor(self.data, divisor)
        assert len(padded) % divisor == 0
        self.data = unpad_dataproto(padded, pad)

    def select(self, rows):
        self.data = self.data.select_idxs(rows)

    def wire(self):
        self.data = DataProto.from_tensordict(codec.decode(codec.encode(self.data.to_tensordict())))

    def check(self):
        rows = self.data.batch["row"].tolist()
        check_tensors(rows, self.data.batch.get)
        arrays = self.data.non_tensor_batch
        for i, row in enumerate(rows):
            check_objects(row, arrays["uid"][i], arrays["reward_model"][i], arrays["tools_kwargs"][i])
        return rows


class Jagged:
    """A TensorDict."""

    def __init__(self, size):
        tensors, objects = columns(size)
        self.td = T.get_tensordict(tensors | objects, {"epoch": 1})

    def reorder(self, order):
        self.td = T.index_select(self.td, order)

    def cut(self, parts):
        padded, pad = T.pad_to_divisor(self.td, parts)
        self.td = T.unpad(T.concat_tensordict(T.chunk_tensordict(padded, parts)), pad)

    def repeat(self, times, interleave):
        rows = torch.arange(self.td.batch_size[0])
        self.td = T.index_select(self.td, rows.repeat_interleave(times) if interleave else rows.repeat(times))

    def pad(self, divisor):
        padded, pad = T.pad_to_divisor(self.td, divisor)
        self.td = T.unpad(padded, pad)

    def select(self, rows):
        self.td = T.index_select(self.td, rows)

    def wire(self):
        self.td = codec.decode(codec.encode(self.td))

    def check(self):
        rows = self.td.get("row").tolist()
        check_tensors(rows, self.td.get)
        for row, *values in zip(rows, *(T.get(self.td, name) for name in ("uid", "reward_model", "tools_kwargs")), strict=True):
            check_objects(row, *values)
        return rows


class Keys:
    """A KVBatchMeta; its keys are distinct, so rows are never repeated."""

    def __init__(self, size):
        self.meta = KVBatchMeta("train", [f"u{i}_0_0" for i in range(size)], [{"seq_len": i, "uid": f"u{i}"} for i in range(size)])

    def reorder(self, order):
        self.meta.reorder(order)

    def cut(self, parts):
        self.meta = KVBatchMeta.concat(self.meta.chunk(parts))

    def select(self, rows):
        self.meta = self.meta.select_keys([self.meta.keys[i] for i in rows])

    def check(self):
        assert self.meta.keys == [f"{tag['uid']}_0_0" for tag in self.meta.tags]
        rows = [tag["seq_len"] for tag in self.meta.tags]
        assert [tag["uid"] for tag in self.meta.tags] == [f"u{row}" for row in rows]
        return rows


class Physical:
    """A BatchMeta; it has no selection by rows but that of a permutation."""

    def __init__(self, size):
        schema = {"responses": FieldSchema("int64", (size, None), 1, per_sample_shapes=[(i % 4,) for i in range(size)])}
        tags = [{"uid": f"u{i}"} for i in range(size)]
        self.meta = BatchMeta(
            list(range(size)), [f"p{i}" for i in range(size)], schema, [i % 2 for i in range(size)], None, tags, [{"at": i} for i in range(size)]
        )

    def reorder(self, order):
        self.meta.reorder(order)

    def cut(self, parts):
        self.meta = BatchMeta.concat(self.meta.chunk(parts))

    def check(self):
        rows = list(self.meta.global_indexes)
        for i, row in enumerate(rows):
            sample = self.meta.per_sample(i)
            assert (sample.partition_id, sample.production_status, sample.tag["uid"]) == (f"p{row}", row % 2, f"u{row}")
            assert sample.shapes["responses"] == (row % 4,) and self.meta.backend_meta[i] == {"at": row}
        return rows


def move(box, rows, name, seed):
    """Make one move in the container and in the plain list; a move the container does not have is left out."""
    dice = random.Random(seed)
    if name == "reorder":
        order = dice.sample(range(len(rows)), len(rows))
        box.reorder(order)
        return [rows[i] for i in order]
    if name == "cut" and rows:
        box.cut(seed % 5 + 1)
    if name == "repeat" and hasattr(box, "repeat") and len(rows) < 30:
        box.repeat(seed % 3 + 1, True)
        return [row for row in rows for _ in range(seed % 3 + 1)]
    if name == "tile" and hasattr(box, "repeat") and len(rows) < 30:
        box.repeat(seed % 3 + 1, False)
        return rows * (seed % 3 + 1)
    if name == "pad" and hasattr(box, "pad") and rows:
        box.pad(seed % 6 + 1)
    if name == "select" and hasattr(box, "select") and rows:
        picked = dice.choices(range(len(rows)), k=dice.randint(0, 6)) if hasattr(box, "repeat") else dice.sample(range(len(rows)), dice.randint(0, len(rows)))
        box.select(picked)
        return [rows[i] for i in picked]
    if name == "wire" and hasattr(box, "wire"):
        box.wire()
    return rows


@many
@given(st.integers(1, 7), MOVES)
def test_every_row_keeps_what_belongs_to_it(size, moves):
    for make in (Padded, Jagged, Keys, Physical):
        box, rows = make(size), list(range(size))
        for name, seed in moves:
            rows = move(box, rows, name, seed)
            assert box.check() == rows, (make.__name__, name)


@many
@given(st.integers(1, 6), st.data())
def test_columns_of_a_permuted_batch_join_their_own_rows(size, data):
    order = data.draw(st.permutations(list(range(size))))
    box = Padded(size)
    late = DataProto.from_dict({"values": torch.arange(size) * 10})
    box.data.reorder(order)
    late.reorder(order)
    box.data.union(late)
    assert box.check() == order and box.data.batch["values"].tolist() == [10 * row for row in order]

"""Two nodes in one process: two indexes in folders of their own, and a wire that passes bytes and counts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from streamrl.dataplane import NodeStore, Store, StoreFace, StoreIndex
from streamrl.dataplane.remote import Get, Head, Put, RemoteStore
from streamrl.errors import DtypeClash, MissingField, MissingKey, NotReady, ProtocolError, StaleWrite, StreamrlError
from streamrl.protocol.fields import ColumnSpec
from streamrl.protocol.meta import KVBatchMeta
from tests.dataplane.store_world import config

COLUMNS = {
    "input_ids": [np.arange(3), np.arange(0), np.arange(2)],
    "score": np.array([0.5, 1.5, 2.5], np.float32),
    "matrix": np.arange(12, dtype=np.float64).reshape(3, 2, 2),
    "wide": [np.arange(4, dtype=np.int32).reshape(2, 2), np.arange(2, dtype=np.int32).reshape(2, 1), np.zeros((2, 0), np.int32)],
    "half": torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
    "note": [{"a": 1}, None, "text"],
}


class Wire:
    """Passes copies: what arrives shares no memory with what was sent, and cannot be written."""

    def __init__(self, face: StoreFace) -> None:
        self.face = face
        self.frames: list[int] = []

    async def __call__(self, header: bytes, buffers: list[np.ndarray]) -> tuple[bytes, list[np.ndarray]]:
        answer, payload = await self.face.answer(bytes(header), self._over(buffers))
        return bytes(answer), self._over(payload)

    def _over(self, buffers: list[np.ndarray]) -> list[np.ndarray]:
        self.frames.append(sum(buffer.nbytes for buffer in buffers))
        return [np.frombuffer(buffer.tobytes(), np.uint8) for buffer in buffers]


class World:
    """``here`` and ``there`` are clients of one node each; ``both`` is the client of an actor on the node of ``here``."""

    def __init__(self, folder: Path, frame_bytes: int) -> None:
        self.indexes = {name: StoreIndex(folder, f"run-{name}", config(), os.getpid()) for name in ("store", "store-1")}
        self.here, self.there = (Store(index, writer=f"w-{name}", folder=index.path, config=config()) for name, index in self.indexes.items())
        self.wire = Wire(StoreFace(self.there, self.indexes["store-1"], frame_bytes))
        self.both = NodeStore(dict(self.indexes), {"store-1": self.wire}, home="store", writer="both", config=config())
        self.both._remotes["store-1"] = RemoteStore(self.wire, frame_bytes)

    def fill(self, here: dict, there: dict, attempt: int = 1) -> KVBatchMeta:
        """Rows h_0_0, h_1_0, … here and t_0_0, … there; their meta, one of each node in turn."""
        keys = {"h": [f"h_{i}_0" for i in range(len(next(iter(here.values()))))], "t": [f"t_{i}_0" for i in range(len(next(iter(there.values()))))]}
        self.here.kv_batch_put(keys["h"], "train", here, [{"attempt": attempt}] * len(keys["h"]))
        self.there.kv_batch_put(keys["t"], "train", there, [{"attempt": attempt}] * len(keys["t"]))
        rows = [row for pair in zip(keys["h"], keys["t"], strict=True) for row in pair]
        return KVBatchMeta("train", rows, [{"node": "store" if key.startswith("h") else "store-1"} for key in rows])


@contextmanager
def world(folder: Path, frame_bytes: int = 1 << 20) -> Iterator[World]:
    made = World(folder, frame_bytes)
    try:
        yield made
    finally:
        for index in made.indexes.values():
            index.close()


def as_lists(batch) -> dict:
    return {name: [row.tolist() for row in value] if isinstance(value, torch.Tensor) else value.tolist() for name, value in batch.items()}


@pytest.mark.parametrize("frame_bytes", [1 << 20, 40])
def test_a_get_over_two_nodes_is_the_get_of_one_that_has_all_rows(tmp_path, frame_bytes):
    with world(tmp_path, frame_bytes) as two:
        meta = two.fill(COLUMNS, COLUMNS)
        both = {name: [row for row in value for _ in range(2)] if isinstance(value, list) else value[[0, 0, 1, 1, 2, 2]] for name, value in COLUMNS.items()}
        two.here.kv_batch_put(meta.keys, "one", both)
        for got in (two.both.kv_batch_get_by_meta(meta), two.both.kv_batch_get(meta.keys, "train")):
            want = two.here.kv_batch_get(meta.keys, "one")
            assert as_lists(got) == as_lists(want)
            assert {name: (value.dtype, value.is_nested) for name, value in got.items() if isinstance(value, torch.Tensor)} == {
                name: (value.dtype, value.is_nested) for name, value in want.items() if isinstance(value, torch.Tensor)
            }
        there = [key for key in meta.keys if key.startswith("t")]
        assert as_lists(two.both.kv_batch_get(there[::-1], "train")) == as_lists(two.there.kv_batch_get(there[::-1], "train"))
        assert max(two.wire.frames) <= max(frame_bytes, 160), "one row is the least that travels"


def test_a_meta_is_asked_for_where_its_tags_say_and_nowhere_else(tmp_path):
    with world(tmp_path) as two:
        meta = two.fill({"x": [np.arange(2)]}, {"x": [np.arange(3)]})
        two.both.kv_batch_get_by_meta(meta.select_keys(["h_0_0"]))
        assert two.wire.frames == []
        wrong = KVBatchMeta("train", ["h_0_0"], [{"node": "store-1"}])
        with pytest.raises(MissingKey, match="h_0_0"):
            two.both.kv_batch_get_by_meta(wrong)
        with pytest.raises(MissingKey, match="store-9"):
            two.both.kv_batch_get_by_meta(KVBatchMeta("train", ["h_0_0"], [{"node": "store-9"}]))


@pytest.mark.parametrize("frame_bytes", [1 << 20, 24])
def test_a_write_back_goes_to_the_node_of_each_row(tmp_path, frame_bytes):
    with world(tmp_path, frame_bytes) as two:
        meta = two.fill({"x": [np.arange(2), np.arange(1)]}, {"x": [np.arange(3), np.arange(4)]})
        values = torch.nested.nested_tensor([torch.arange(n, dtype=torch.float32) for n in (2, 3, 1, 4)], layout=torch.jagged)
        two.both.kv_batch_put_by_meta(meta, {"advantages": values, "weight": torch.arange(4.0), "why": ["a", "b", "c", "d"]})
        assert as_lists(two.here.kv_batch_get(["h_0_0", "h_1_0"], "train", ["advantages", "weight", "why"])) == {
            "advantages": [[0.0, 1.0], [0.0]],
            "weight": [0.0, 2.0],
            "why": ["a", "c"],
        }
        assert as_lists(two.there.kv_batch_get(["t_1_0", "t_0_0"], "train", ["advantages", "why"])) == {
            "advantages": [[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0]],
            "why": ["d", "b"],
        }


def test_new_rows_go_to_the_own_node_and_a_node_without_a_store_takes_none(tmp_path):
    with world(tmp_path) as two:
        two.both.kv_put("n_0_0", "train", {"x": np.arange(2)})
        assert two.here.kv_list("train") and not two.there.kv_list("train") and sum(two.wire.frames) == 0
        homeless = NodeStore({"store-1": two.indexes["store-1"]}, {"store-1": two.wire}, home=None, writer="r", config=config())
        homeless.kv_put("m_0_0", "train", {"x": np.arange(2)})  # sent to a node that has a store
        assert two.there.kv_list("train") == {"train": {"m_0_0": {}}}


WRONG = {
    "an unknown key": lambda store, key: store.kv_batch_get([key, "t_9_0"], "train"),
    "a missing column": lambda store, key: store.kv_batch_get([key], "train", ["y"]),
    "a row of tags": lambda store, key: store.kv_batch_get(["t_tags_0"], "train"),
    "another dtype": lambda store, key: store.kv_batch_put([key], "train", {"x": [np.arange(2, dtype=np.float32)]}),
    "another kind": lambda store, key: store.kv_batch_put([key], "train", {"x": np.arange(1)}),
    "a known field of another dtype": lambda store, key: store.kv_batch_put([key], "train", {"advantages": [np.arange(2)]}),
    "too few values": lambda store, key: store.kv_batch_put([key], "train", {"z": []}),
    "a key twice": lambda store, key: store.kv_batch_put([key, key], "train", {"x": [np.arange(2), np.arange(2)]}),
    "an older attempt": lambda store, key: store.kv_batch_put([key], "train", {"x": [np.arange(2)]}, [{"attempt": 1}]),
    "a length that its tag denies": lambda store, key: store.kv_batch_put([key], "train", {"response_mask": [np.arange(2)]}),
    "neither fields nor tags": lambda store, key: store.kv_batch_put([key], "train"),
    "a tag of a tensor": lambda store, key: store.kv_batch_put([key], "train", None, [{"a": np.arange(2)}]),
    "no keys": lambda store, key: store.kv_batch_get([], "train"),
}


@pytest.mark.parametrize("case", WRONG)
def test_another_node_refuses_in_the_same_words_as_the_own(tmp_path, case):
    with world(tmp_path) as two:
        two.there.kv_batch_put(["t_0_0"], "train", {"x": [np.arange(2)]}, [{"attempt": 2, "response_len": 3}])
        two.there.kv_batch_put(["t_tags_0"], "train", None, [{"a": 1}])
        errors: list[StreamrlError] = []
        for store in (two.there, NodeStore({"store-1": two.indexes["store-1"]}, {"store-1": two.wire}, home=None, writer="r", config=config())):
            with pytest.raises(StreamrlError) as caught:
                WRONG[case](store, "t_0_0")
            errors.append(caught.value)
        assert type(errors[0]) is type(errors[1]) and str(errors[0]) == str(errors[1])
        assert type(errors[0]) in (MissingKey, MissingField, NotReady, DtypeClash, StaleWrite, ProtocolError)


def test_columns_that_differ_between_nodes_are_never_cast_together(tmp_path):
    with world(tmp_path) as two:
        meta = two.fill({"x": [np.arange(2)], "only": [1]}, {"x": [np.arange(2, dtype=np.float32)], "other": [2]})
        with pytest.raises(DtypeClash, match="'x' is one kind on all nodes"):
            two.both.kv_batch_get_by_meta(meta)
        with pytest.raises(MissingField):
            two.both.kv_batch_get(meta.keys, "train", ["only"])
        got = two.both.kv_batch_get(meta.keys, "train", ["only", "nobody"], optional=True)
        assert got["only"].tolist() == [1, None] and got["presence"]["only"].tolist() == [True, False] and not got["presence"]["nobody"].any()


def test_clearing_listing_and_the_later_of_two_attempts_span_the_nodes(tmp_path):
    with world(tmp_path) as two:
        two.fill({"x": [np.arange(2)]}, {"x": [np.arange(3)]})
        two.there.kv_batch_put(["h_0_0"], "train", {"x": [np.arange(5)]}, [{"attempt": 2}])  # leased again, to a worker of the other node
        assert two.both.kv_list("train")["train"] == {"h_0_0": {"attempt": 2}, "t_0_0": {"attempt": 1}}
        assert two.both.kv_batch_get(["h_0_0"], "train")["x"][0].tolist() == list(range(5))
        assert two.both.kv_clear(["h_0_0", "t_0_0"], "train") == 3
        assert two.both.kv_list() == {}


def test_a_frame_that_does_not_fit_its_header_is_refused_and_changes_nothing(tmp_path):
    with world(tmp_path) as two:
        remote = two.both._remotes["store-1"]
        heads = [Head("x", ColumnSpec("int64", "ragged", 0), [2])]
        for asked, buffers in ((Put("train", ["a"], heads, None), []), (Put("train", ["a"], heads, None), [np.zeros(15, np.uint8)])):
            with pytest.raises(ProtocolError, match="buffer"):
                two.both._run.wait(remote._ask(asked, buffers))
        with pytest.raises(ProtocolError, match="known header"):
            two.both._run.wait(_raw(remote, b"\x00nonsense"))
        with pytest.raises(ProtocolError, match="one buffer per column"):
            two.both._run.wait(remote._ask(Put("train", ["a"], heads, None), [np.zeros(16, np.uint8)] * 2))
        with pytest.raises(MissingKey):
            two.both._run.wait(remote._ask(Get("train", ["a"], None, False), []))


async def _raw(remote: RemoteStore, header: bytes):
    import msgspec

    from streamrl.dataplane.remote import Answer
    from streamrl.errors import from_wire

    answer = msgspec.msgpack.decode((await remote._wire(header, []))[0], type=Answer)
    if answer.error is not None:
        raise from_wire(*answer.error)

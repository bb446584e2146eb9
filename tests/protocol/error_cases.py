"""Every refusal of the protocol as (operation, call, kinds of error): one row for each error that the rules name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from streamrl.protocol import BatchMeta, DataProto, KVBatchMeta, TrajectoryKey, codec
from streamrl.protocol import tensors as T
from streamrl.protocol.batch_meta import FieldSchema
from streamrl.protocol.dataproto import fold_batch_dim, pad_dataproto_to_divisor, unfold_batch_dim, unpad_dataproto
from streamrl.protocol.dispatch import PADDING_COLUMN, collect, dispatch, run_on_store
from streamrl.protocol.fields import trajectory_columns
from streamrl.protocol.keys import check_uid
from streamrl.testing.rows import make_trajectory
from tests.protocol.batches import batch, components, jagged, strided


class Case(NamedTuple):
    operation: str
    call: Callable[[], object]
    kinds: tuple[type[Exception], ...] = ()


def data(size: int = 3) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(size), "w": torch.zeros(size, 4)}, {"uid": [str(i) for i in range(size)]}, {"step": 1})


def meta(size: int = 3, first: int = 0, **kw: object) -> KVBatchMeta:
    names = range(first, first + size)
    return KVBatchMeta("train", [f"A_{i}_0" for i in names], [{"i": i} for i in names], **kw)  # type: ignore[arg-type]


def physical(size: int = 3, **kw: object) -> BatchMeta:
    return BatchMeta(list(range(size)), ["train"] * size, {"x": FieldSchema("int64", (size,), is_scalar=True)}, **kw)  # type: ignore[arg-type]


class OneStore:
    def get(self, meta: object) -> TensorDict:
        return T.get_tensordict({"x": torch.zeros(3)})

    def put(self, meta: object, columns: object) -> None:
        raise LookupError("a refused result was written")


def td(**columns: object) -> TensorDict:
    return T.get_tensordict(columns)


def padded(**changes: torch.Tensor) -> TensorDict:
    """One row: a prompt of 1 and a response of 2, each padded by one."""
    columns = dict.fromkeys(("responses", "response_mask"), torch.ones(1, 3, dtype=torch.int64)) | {"prompts": torch.ones(1, 2, dtype=torch.int64)}
    columns |= dict.fromkeys(("input_ids", "position_ids"), torch.ones(1, 5, dtype=torch.int64)) | {"attention_mask": torch.tensor([[0, 1, 1, 1, 0]])}
    return T.get_tensordict(columns | changes)


KEYS = [
    Case("check_uid underscore", lambda: check_uid("a_b")),
    Case("check_uid empty", lambda: check_uid("")),
    Case("TrajectoryKey negative", lambda: TrajectoryKey("a", -1, 0)),
    Case("TrajectoryKey float", lambda: TrajectoryKey("a", 1.5, 0)),  # type: ignore[arg-type]
    Case("parse", lambda: TrajectoryKey.parse("a_01_0")),
    Case("parse of a number beyond 64 bits", lambda: TrajectoryKey.parse(f"a_{'9' * 5000}_0")),
]
ROWS = [
    Case("trajectory without a prompt", lambda: trajectory_columns([make_trajectory(prompt_ids=[])])),
    Case("trajectory without a response", lambda: trajectory_columns([make_trajectory(response_ids=())])),
    Case("trajectory of observations", lambda: trajectory_columns([make_trajectory(response_mask=[0, 0])])),
    Case("short response_mask", lambda: trajectory_columns([make_trajectory(response_mask=[1])])),
    Case("short rollout_versions", lambda: trajectory_columns([make_trajectory(rollout_versions=[0])])),
    Case("short response_logprobs", lambda: trajectory_columns([make_trajectory(response_logprobs=[0.0])])),
    Case("reward nan", lambda: trajectory_columns([make_trajectory(reward=float("nan"))])),
    Case("reward inf", lambda: trajectory_columns([make_trajectory(reward=float("inf"))])),
    Case("short position_ids", lambda: trajectory_columns([make_trajectory(position_ids=[[0, 1, 2], [0, 1]])])),
    Case("no component", lambda: trajectory_columns([make_trajectory(position_ids=[])])),
    Case("log-probs of some rows", lambda: trajectory_columns([make_trajectory(), make_trajectory("b", response_logprobs=None)])),
    Case("rewards of some rows", lambda: trajectory_columns([make_trajectory(), make_trajectory("b", reward=None)])),
]
TENSORDICTS = [
    Case("get_tensordict tensor in list", lambda: td(x=[torch.ones(1)])),
    Case("get_tensordict strided", lambda: td(x=strided())),
    Case("get_tensordict with gaps", lambda: td(x=torch.nested.narrow(torch.ones(2, 4), 1, torch.tensor([0, 1]), torch.tensor([2, 2]), layout=torch.jagged))),
    Case("get_tensordict sizes", lambda: td(x=[1], y=[1, 2])),
    Case("get_tensordict name twice", lambda: T.get_tensordict({"x": [1]}, {"x": 1})),
    Case("get_tensordict other type", lambda: td(x="text")),
    Case("list_of_dict empty", lambda: T.list_of_dict_to_tensordict([])),
    Case("list_of_dict more keys", lambda: T.list_of_dict_to_tensordict([{"x": 1}, {"x": 1, "y": 1}])),
    Case("list_of_dict fewer keys", lambda: T.list_of_dict_to_tensordict([{"x": 1, "y": 1}, {"x": 1}])),
    Case("list_of_dict mixed kinds", lambda: T.list_of_dict_to_tensordict([{"x": torch.ones(1)}, {"x": 1}])),
    Case("list_of_dict mixed dtype", lambda: T.list_of_dict_to_tensordict([{"x": torch.ones(1)}, {"x": torch.arange(1)}]), (TypeError,)),
    Case("assign_non_tensor", lambda: T.assign_non_tensor(batch([1]), x=[1, 2])),
    Case("get_keys", lambda: T.get_keys(batch([1]), ["q"]), (KeyError,)),
    Case("pop_keys", lambda: T.pop_keys(batch([1]), ["q"]), (KeyError,)),
    Case("nested_from_list empty", lambda: T.nested_from_list([])),
    Case("nested_from_list dtype", lambda: T.nested_from_list([torch.ones(1), torch.arange(1)]), (TypeError,)),
    Case("nested_from_list other axes", lambda: T.nested_from_list([torch.ones(2, 1), torch.ones(3, 1)])),
    Case("nested_from_list nested", lambda: T.nested_from_list([jagged([1])])),
    Case("nested_from_list axis", lambda: T.nested_from_list([torch.ones(2)], 1)),
    Case("nested_from_list lists", lambda: T.nested_from_list([[1, 2]]), (TypeError,)),  # type: ignore[list-item]
    Case("concat_nested empty", lambda: T.concat_nested([])),
    Case("concat_nested dense", lambda: T.concat_nested([torch.ones(2, 2)])),
    Case("concat_nested strided", lambda: T.concat_nested([strided()])),
    Case("concat_nested ragged axis", lambda: T.concat_nested([jagged([2]), components([2])])),
    Case("concat_nested dtype", lambda: T.concat_nested([jagged([2]), jagged([2], torch.float32)]), (TypeError,)),
    Case("concat_tensordict empty", lambda: T.concat_tensordict([])),
    Case("concat_tensordict keys", lambda: T.concat_tensordict([td(x=[1]), td(y=[1])])),
    Case("concat_tensordict nestedness", lambda: T.concat_tensordict([td(x=jagged([2])), td(x=torch.ones(1, 2, dtype=torch.int64))])),
    Case("concat_tensordict scalars", lambda: T.concat_tensordict([T.get_tensordict({}, {"e": 1}), T.get_tensordict({}, {"e": 2})])),
    Case("chunk_tensordict", lambda: T.chunk_tensordict(batch([1] * 10), 4)),
    Case("index_select 2-D", lambda: T.index_select(batch([1]), [[0]])),
    Case("index_select uneven", lambda: T.index_select(batch([1]), [[0], [0, 0]]), (TypeError,)),  # type: ignore[list-item]
    Case("index_select mask", lambda: T.index_select(batch([1]), torch.tensor([True]))),
    Case("index_select out of range", lambda: T.index_select(batch([1]), [1]), (IndexError,)),
    Case("index_select negative", lambda: T.index_select(batch([1]), [-1]), (IndexError,)),
    Case("union sizes", lambda: T.union(batch([1]), td(y=[1, 2]))),
    Case("union values", lambda: T.union(td(x=[1]), td(x=[2]))),
    Case("union nan", lambda: T.union(td(x=torch.tensor([float("nan")])), td(x=torch.tensor([float("nan")])))),
    Case("make_iterator size", lambda: T.make_iterator(batch([1] * 3), 2, 1)),
    Case("make_iterator batch_size", lambda: T.make_iterator(batch([1] * 2), 2, 1, dataloader_kwargs={"batch_size": 1})),
    Case("make_iterator kwargs", lambda: T.make_iterator(batch([1] * 2), 2, 1, dataloader_kwargs=["shuffle"]), (TypeError,)),  # type: ignore[arg-type]
    Case("pad_to_divisor", lambda: T.pad_to_divisor(batch([1]), 0)),
    Case("unpad", lambda: T.unpad(batch([1]), 2)),
    Case("assert_equal columns", lambda: T.assert_equal(td(x=[1]), td(y=[1]))),
    Case("assert_equal rows", lambda: T.assert_equal(td(x=[1]), td(x=[1, 1]))),
    Case("assert_equal kinds", lambda: T.assert_equal(td(x=[1]), td(x=torch.ones(1)))),
    Case("assert_equal dtypes", lambda: T.assert_equal(td(x=torch.ones(1)), td(x=torch.ones(1, dtype=torch.int64)))),
    Case("assert_equal values", lambda: T.assert_equal(td(x=jagged([1, 2])), td(x=jagged([1, 2], first=1)))),
    Case("assert_equal row lengths", lambda: T.assert_equal(td(x=jagged([1, 2])), td(x=jagged([2, 1])))),
]
LAYOUTS = [
    Case("to_padded_tensor width", lambda: T.to_padded_tensor(jagged([3]), 2)),
    Case("to_padded_tensor dense", lambda: T.to_padded_tensor(torch.ones(2, 2))),
    Case("response_from_nested without a prompt", lambda: T.response_from_nested(jagged([3]), jagged([3]))),
    Case("response_from_nested rows", lambda: T.response_from_nested(jagged([3, 3]), jagged([1]))),
    Case("response_from_nested axis", lambda: T.response_from_nested(components([3]), jagged([1]))),
    Case("response_to_nested width", lambda: T.response_to_nested(torch.ones(1, 2), jagged([3]))),
    Case("response_to_nested rows", lambda: T.response_to_nested(torch.ones(2, 3), jagged([3]))),
    Case("no_padding_2_padding tokens", lambda: T.no_padding_2_padding(jagged([3]), td(prompts=jagged([1]), responses=jagged([1])))),
    Case("no_padding_2_padding fields", lambda: T.no_padding_2_padding(jagged([3]), td(prompts=jagged([1]))), (KeyError,)),
    Case("left_right fields", lambda: T.left_right_2_no_padding(td(prompts=torch.ones(1, 1))), (KeyError,)),
    Case("left_right gap", lambda: T.left_right_2_no_padding(padded(attention_mask=torch.tensor([[1, 0, 1, 1, 0]])))),
    Case("left_right mask width", lambda: T.left_right_2_no_padding(padded(attention_mask=torch.tensor([[1, 1, 1, 1]])))),
    Case("left_right column width", lambda: T.left_right_2_no_padding(padded(rm_scores=torch.ones(1, 4)))),
    Case("to_padded_dataproto width", lambda: T.to_padded_dataproto(td(prompts=jagged([2]), responses=jagged([1])), 0, max_prompt_length=1)),
    Case("to_padded_dataproto lengths", lambda: T.to_padded_dataproto(td(prompts=jagged([2]), responses=jagged([1]), rm_scores=jagged([2])), 0)),
    Case("to_padded_dataproto fields", lambda: T.to_padded_dataproto(td(prompts=jagged([2])), 0), (KeyError,)),
]
DATAPROTO = [
    Case("construct batch", lambda: DataProto({"x": torch.ones(1)}), (TypeError,)),  # type: ignore[arg-type]
    Case("construct batch dims", lambda: DataProto(TensorDict({"x": torch.zeros(2, 3)}, batch_size=[2, 3]))),
    Case("construct not an array", lambda: DataProto(None, {"x": [1]})),  # type: ignore[dict-item]
    Case("construct size", lambda: DataProto(TensorDict({"x": torch.zeros(2)}, batch_size=[2]), {"uid": np.zeros(3)})),
    Case("from_single_dict", lambda: DataProto.from_single_dict({"x": [1]})),
    Case("from_dict batch dims", lambda: DataProto.from_dict({"x": torch.zeros(2)}, num_batch_dims=2)),
    Case("from_dict sizes", lambda: DataProto.from_dict({"x": torch.zeros(2), "y": torch.zeros(3)})),
    Case("from_dict not a tensor", lambda: DataProto.from_dict({"x": [1]})),  # type: ignore[dict-item]
    Case("to_tensordict name twice", lambda: DataProto.from_dict({"x": torch.zeros(1)}, meta_info={"x": 1}).to_tensordict()),
    Case("from_tensordict name twice", lambda: DataProto.from_tensordict(T.get_tensordict({"x": [1]}, {"a": 1}), {"a": 2})),
    Case("int", lambda: data()[3], (IndexError,)),
    Case("select_idxs type", lambda: data()["x"], (TypeError,)),
    Case("select_idxs floats", lambda: data()[[0.5]], (TypeError,)),
    Case("select_idxs uneven", lambda: data()[[[0], [0, 1]]], (TypeError,)),
    Case("select_idxs mask", lambda: data()[[True]]),
    Case("select_idxs range", lambda: data()[[3]], (IndexError,)),
    Case("select", lambda: data().select(["q"]), (KeyError,)),
    Case("select non-tensor", lambda: data().select(non_tensor_batch_keys=["q"]), (KeyError,)),
    Case("select meta", lambda: data().select(meta_info_keys=["q"]), (KeyError,)),
    Case("pop", lambda: data().pop(["q"]), (KeyError,)),
    Case("pop non-tensor", lambda: data().pop(non_tensor_batch_keys=["q"]), (KeyError,)),
    Case("pop meta", lambda: data().pop(meta_info_keys=["q"]), (KeyError,)),
    Case("rename type", lambda: data().rename(("x",), ("y",)), (TypeError,)),  # type: ignore[arg-type]
    Case("rename lengths", lambda: data().rename(["x"], ["y", "z"])),
    Case("rename missing", lambda: data().rename("q", "y"), (KeyError,)),
    Case("rename collision", lambda: data().rename("x", "w")),
    Case("rename collision with an array", lambda: data().rename("x", "uid")),
    Case("from_dict one name twice", lambda: DataProto.from_dict({"x": torch.ones(3)}, {"x": [1, 2, 3]})),
    Case("union array of a tensor's name", lambda: data().union(DataProto.from_dict(non_tensors={"x": [1, 2, 3]}))),
    Case("union tensor of an array's name", lambda: data().union(DataProto.from_dict({"uid": torch.ones(3)}))),
    Case("union sizes", lambda: data().union(data(2))),
    Case("union tensors", lambda: data().union(DataProto.from_dict({"x": torch.ones(3)}))),
    Case("union arrays", lambda: data().union(DataProto.from_dict(non_tensors={"uid": ["a", "b", "c"]}))),
    Case("union meta", lambda: data().union(DataProto(meta_info={"step": 2}))),
    Case("concat metrics", lambda: DataProto.concat([DataProto(meta_info={"metrics": 5})]), (TypeError,)),
    Case("concat empty", lambda: DataProto.concat([])),
    Case("concat keys", lambda: DataProto.concat([data(), data().select(["x"])])),
    Case("concat non-tensor keys", lambda: DataProto.concat([data(), data().select(non_tensor_batch_keys=[])])),
    Case("concat meta", lambda: DataProto.concat([data(), DataProto(data().batch, data().non_tensor_batch, {"step": 2})])),
    Case("concat tensors and none", lambda: DataProto.concat([DataProto(None, {"a": np.zeros(1)}), data()])),
    Case(
        "concat dtypes", lambda: DataProto.concat([DataProto(None, {"a": np.zeros(1, np.int32)}), DataProto(None, {"a": np.zeros(1, np.int64)})]), (TypeError,)
    ),
    Case("concat shapes", lambda: DataProto.concat([DataProto(None, {"a": np.zeros((1, 2))}), DataProto(None, {"a": np.zeros((1, 3))})])),
    Case("chunk", lambda: data(10).chunk(4)),
    Case("chunk zero", lambda: data().chunk(0)),
    Case("split", lambda: data().split(0)),
    Case("reorder length", lambda: data().reorder([0, 1])),
    Case("reorder twice", lambda: data().reorder([0, 0, 1])),
    Case("reorder range", lambda: data().reorder([0, 1, 3]), (IndexError,)),
    Case("reorder 2-D", lambda: data().reorder(torch.zeros(1, 3, dtype=torch.int64))),
    Case("reorder floats", lambda: data().reorder(torch.zeros(3)), (TypeError,)),
    Case("repeat", lambda: data().repeat(0)),
    Case("repeat half", lambda: data().repeat(1.5), (TypeError,)),  # type: ignore[arg-type]
    Case("chunk half", lambda: data().chunk(1.5), (TypeError,)),  # type: ignore[arg-type]
    Case("split half", lambda: data().split(1.5), (TypeError,)),  # type: ignore[arg-type]
    Case("unfold half", lambda: data().unfold_column_chunks(1.5), (TypeError,)),  # type: ignore[arg-type]
    Case("sample_level_repeat length", lambda: data().sample_level_repeat([1])),
    Case("sample_level_repeat negative", lambda: data().sample_level_repeat([1, -1, 1])),
    Case("sample_level_repeat type", lambda: data().sample_level_repeat("111")),
    Case("make_iterator size", lambda: data().make_iterator(2, 1)),
    Case("make_iterator batch_size", lambda: T.make_iterator(batch([1] * 2), 2, 1, dataloader_kwargs={"batch_size": 1})),
    Case("make_iterator kwargs", lambda: data().make_iterator(3, 1, dataloader_kwargs=[1]), (TypeError,)),  # type: ignore[arg-type]
    Case("padding of nothing", lambda: DataProto().padding(1)),
    Case("padding negative", lambda: data().padding(-1)),
    Case("padding candidate", lambda: data().padding(1, "middle")),
    Case("pad_dataproto_to_divisor", lambda: pad_dataproto_to_divisor(data(), 0)),
    Case("unpad_dataproto", lambda: unpad_dataproto(data(), 4)),
    Case("fold_batch_dim", lambda: fold_batch_dim(data(), 2)),
    Case("fold_batch_dim jagged", lambda: fold_batch_dim(DataProto.from_dict({"r": jagged([1, 2])}), 2)),
    Case("unfold_batch_dim", lambda: unfold_batch_dim(data())),
    Case("unfold_batch_dim jagged", lambda: unfold_batch_dim(DataProto.from_dict({"r": jagged([1, 2])}))),
    Case("unfold_column_chunks", lambda: data().unfold_column_chunks(3, ["w"])),
    Case("unfold_column_chunks missing", lambda: data().unfold_column_chunks(2, ["q"]), (KeyError,)),
    Case("unfold_column_chunks jagged", lambda: DataProto.from_dict({"r": jagged([2, 2])}).unfold_column_chunks(2, ["r"])),
    Case("pickle of an object", lambda: codec.encode({"x": object()})),
    Case("decode noise", lambda: codec.decode(b"noise" * 20)),
    Case("decode a cut", lambda: codec.decode(codec.encode([1])[:-1])),
]
METAS = [
    Case("construct", lambda: KVBatchMeta("train", ["A_0_0"], [])),
    Case("construct keys twice", lambda: KVBatchMeta("train", ["A_0_0"] * 2, [{}, {}])),
    Case("construct fields twice", lambda: meta(fields=["x", "x"])),
    Case("construct tag value", lambda: KVBatchMeta("train", ["A_0_0"], [{"x": [1]}])),
    Case("construct tag", lambda: KVBatchMeta("train", ["A_0_0"], [[1]]), (TypeError,)),  # type: ignore[list-item]
    Case("construct one name for keys", lambda: KVBatchMeta("t", "ab", [{}, {}]), (TypeError,)),  # type: ignore[arg-type]
    Case("construct one name for fields", lambda: meta(fields="ab"), (TypeError,)),
    Case("with_fields one name", lambda: meta().with_fields("ab"), (TypeError,)),
    Case("select_keys one name", lambda: meta().select_keys("A_0_0"), (TypeError,)),
    Case("select_keys twice", lambda: meta().select_keys(["A_0_0", "A_0_0"])),
    Case("select_keys unknown", lambda: meta().select_keys(["B_0_0"]), (RuntimeError, KeyError)),
    Case("reorder length", lambda: meta().reorder([0])),
    Case("reorder twice", lambda: meta().reorder([0, 0, 1])),
    Case("reorder range", lambda: meta().reorder([0, 1, 3]), (IndexError,)),
    Case("reorder mask", lambda: meta(2).reorder([True, False]), (TypeError,)),
    Case("reorder floats", lambda: meta().reorder([0.0, 1.0, 2.0]), (TypeError,)),  # type: ignore[list-item]
    Case("chunk", lambda: meta().chunk(0)),
    Case("chunk half", lambda: meta().chunk(1.5), (TypeError,)),  # type: ignore[arg-type]
    Case("concat partition", lambda: KVBatchMeta.concat([meta(), KVBatchMeta("val", ["B_0_0"], [{}])])),
    Case("concat fields", lambda: KVBatchMeta.concat([meta(fields=["x"]), meta(first=3, fields=["y"])])),
    Case("concat extra_info", lambda: KVBatchMeta.concat([meta(extra_info={"a": np.ones(2)}), meta(first=3, extra_info={"a": np.zeros(2)})])),
    Case("concat keys twice", lambda: KVBatchMeta.concat([meta(), meta()])),
    Case("with_fields twice", lambda: meta().with_fields(["x", "x"])),
    Case("BatchMeta lengths", lambda: BatchMeta([0], [])),
    Case("BatchMeta indexes twice", lambda: BatchMeta([0, 0], ["train"] * 2)),
    Case("BatchMeta scalar shape", lambda: BatchMeta([0], ["train"], {"x": FieldSchema("int64", (1, 1), is_scalar=True)})),
    Case("BatchMeta chunk", lambda: physical().chunk(0)),
    Case("BatchMeta union", lambda: physical().union(physical(2))),
    Case("BatchMeta concat fields", lambda: BatchMeta.concat([physical(), BatchMeta([5], ["train"])])),
    Case("BatchMeta concat extra_info", lambda: BatchMeta.concat([physical(), BatchMeta([5], ["train"], extra_info={"a": 1})])),
    Case("BatchMeta reorder", lambda: physical().reorder([0, 0, 1])),
    Case("BatchMeta select_fields", lambda: physical().select_fields(["q"]), (KeyError,)),
    Case("BatchMeta per_sample", lambda: physical().per_sample(3), (IndexError,)),
]
DISPATCH = [
    Case("dispatch ranks", lambda: dispatch([1], {}, 0)),
    Case("dispatch parts", lambda: dispatch([meta()], {}, 2, parts=[meta(2), meta(2)])),
    Case("dispatch rows", lambda: dispatch([batch([1] * 3)], {}, 2)),
    Case("dispatch paddings", lambda: dispatch([data(3), data(4)], {}, 2, auto_padding=True)),
    Case("dispatch mark", lambda: dispatch([DataProto.from_dict({PADDING_COLUMN: torch.zeros(3)})], {}, 2, auto_padding=True)),
    Case("bridge rows", lambda: run_on_store(lambda td: T.get_tensordict({"y": [1]}), [meta()], {}, OneStore())),
    Case("bridge rows of nothing", lambda: run_on_store(lambda td: TensorDict({}, batch_size=[2]), [meta()], {}, OneStore())),
    Case("bridge name twice", lambda: run_on_store(lambda td: td, [meta(extra_info={"x": 1})], {}, OneStore())),
    Case("collect nothing", lambda: collect([], meta())),
    Case("collect rows", lambda: collect(meta().chunk(3)[:2], meta())),
    Case("collect one rank twice", lambda: collect([meta(2)] * 2, meta(4))),
    Case("collect other rows", lambda: collect([meta(3, first=7)], meta())),
]
CASES = [
    Case(f"{part}: {case.operation}", case.call, case.kinds)
    for part, cases in {
        "keys": KEYS,
        "rows": ROWS,
        "tensordict": TENSORDICTS,
        "layout": LAYOUTS,
        "DataProto": DATAPROTO,
        "meta": METAS,
        "dispatch": DISPATCH,
    }.items()
    for case in cases
]

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.protocol import BatchMeta, DataProto, KVBatchMeta
from streamrl.protocol import tensors as T
from streamrl.protocol.dispatch import PADDING_COLUMN, collect, dispatch, is_chunkable, run_on_store, trim
from tests.protocol.batches import jagged, quick


class DictStore:
    """Rows by key, column by column."""

    def __init__(self, columns):
        self.columns = columns
        self.puts = []

    def get(self, meta):
        names = meta.fields or list(self.columns)
        return T.get_tensordict({name: torch.stack([self.columns[name][key] for key in meta.keys]) for name in names})

    def put(self, meta, columns):
        self.puts.append((list(meta.keys), sorted(columns.keys())))
        for name in columns.keys():
            self.columns.setdefault(name, {}).update(zip(meta.keys, columns.get(name), strict=True))


def make(size, **kw):
    return KVBatchMeta("train", [f"A_{i}_0" for i in range(size)], [{"seq_len": i} for i in range(size)], **kw)


def store(size):
    return DictStore({"x": {f"A_{i}_0": torch.tensor(float(i)) for i in range(size)}})


def test_only_containers_with_rows_are_cut():
    assert all(is_chunkable(value) for value in (make(1), BatchMeta(), DataProto(), T.get_tensordict({"x": [1]})))
    assert not any(is_chunkable(value) for value in (3, [1, 2], {"a": 1}, torch.zeros(4), None))


def test_each_group_gets_one_contiguous_part_and_the_rest_is_broadcast():
    td = T.get_tensordict({"j": jagged([1, 2, 3, 4])})
    calls, pad = dispatch([make(4), 7], {"td": td, "flag": [1, 2]}, 2, ranks_per_group=2)
    assert pad == 0 and len(calls) == 4
    assert [call.args[0].keys for call in calls] == [["A_0_0", "A_1_0"]] * 2 + [["A_2_0", "A_3_0"]] * 2
    assert all(call.args[1] == 7 and call.kwargs["flag"] == [1, 2] for call in calls)
    assert T.lengths_of(calls[2].kwargs["td"].get("j")).tolist() == [3, 4]
    assert calls[2].kwargs["td"].get("j").values().untyped_storage().nbytes() == 7 * 8


def test_a_meta_is_resolved_once():
    asked = []

    def resolve(meta):
        asked.append(meta)
        return BatchMeta(list(range(len(meta))), ["train"] * len(meta))

    calls, _ = dispatch([make(3)], {}, 2, resolve=resolve)
    assert len(asked) == 1 and [call.args[0].global_indexes for call in calls] == [[0, 1], [2]]


def test_explicit_parts_replace_the_cut_and_hold_every_row_once():
    meta = make(3)
    parts = [meta.select_keys(["A_2_0"]), meta.select_keys(["A_1_0", "A_0_0"])]
    calls, _ = dispatch([meta], {"x": 1}, 2, parts=parts)
    assert [call.args[0].keys for call in calls] == [["A_2_0"], ["A_1_0", "A_0_0"]]
    for bad in (parts[:1], [parts[0], parts[0]]):
        with pytest.raises(ValueError):
            dispatch([meta], {}, 2, parts=bad)
    with pytest.raises(ValueError):
        dispatch([3], {}, 2, parts=parts)


def test_auto_padding_is_trimmed_from_the_output():
    data = DataProto.from_dict({"x": torch.arange(5)})
    with pytest.raises(ValueError):
        dispatch([data], {}, 2)
    calls, pad = dispatch([data], {}, 2, auto_padding=True)
    assert pad == 1 and [call.args[0].batch["x"].tolist() for call in calls] == [[0, 1, 2], [3, 4, 0]]
    assert [call.args[0].batch[PADDING_COLUMN].tolist() for call in calls] == [[False] * 3, [False, False, True]]
    out = trim(DataProto.concat([call.args[0] for call in calls]), pad)
    assert out.batch["x"].tolist() == [0, 1, 2, 3, 4] and PADDING_COLUMN not in out.batch.keys() and PADDING_COLUMN not in data.batch.keys()
    assert trim({"loss": 1}, pad) == {"loss": 1}


def test_padded_arguments_have_one_size():
    short, long = DataProto.from_dict({"x": torch.arange(4)}), DataProto.from_dict({"x": torch.arange(5)})
    with pytest.raises(ValueError, match="paddings"):
        dispatch([short, long], {}, 2, auto_padding=True)
    with pytest.raises(ValueError):
        dispatch([], {}, 0)


@quick
@given(st.integers(0, 12), st.integers(1, 5), st.integers(1, 3))
def test_each_row_reaches_one_group_and_comes_back_in_order(size, dp_size, ranks_per_group):
    meta = make(size, fields=["x"])
    calls, _ = dispatch([], {"meta": meta}, dp_size, ranks_per_group=ranks_per_group)
    assert len(calls) == dp_size * ranks_per_group
    firsts = [call.kwargs["meta"] for call in calls[::ranks_per_group]]
    assert all(calls[rank].kwargs["meta"] is firsts[rank // ranks_per_group] for rank in range(len(calls)))
    back = collect(firsts, meta)
    assert (back.keys, back.tags, back.fields) == (meta.keys, meta.tags, meta.fields)


def test_the_first_meta_is_written_to_and_every_meta_becomes_a_batch():
    keep = store(2)

    def add(left, right, scale):
        return T.get_tensordict({"y": (left.get("x") + right.get("x")) * scale})

    out = run_on_store(add, [make(2, extra_info={"side": "left"})], {"right": make(2), "scale": 3}, keep)
    assert out.extra_info == {"side": "left"} and [keep.columns["y"][key].item() for key in out.keys] == [0, 6]


def test_a_call_without_a_meta_is_plain():
    assert run_on_store(lambda a, b: a + b, [1], {"b": 2}, store(0)) == 3


def test_results_are_written_back_and_scalars_become_extra_info():
    keep = store(3)

    def double(td, factor):
        assert T.get(td, "step") == 5 and factor == 2
        return T.get_tensordict({"y": td.get("x") * factor, "note": ["a", "b", "c"]}, {"loss": 0.5})

    out = run_on_store(double, [], {"td": make(3, extra_info={"step": 5}), "factor": 2}, keep)
    assert out.extra_info == {"step": 5, "loss": 0.5} and out.keys == make(3).keys and out.tags == make(3).tags
    assert keep.puts == [(make(3).keys, ["note", "y"])] and [keep.columns["y"][key].item() for key in out.keys] == [0, 2, 4]


def test_only_the_collecting_rank_writes():
    keep = store(2)
    run_on_store(lambda td: T.get_tensordict({"y": td.get("x")}), [make(2)], {}, keep, is_collector=False)
    assert keep.puts == []


def test_a_result_with_other_rows_is_refused_and_not_written():
    keep = store(3)
    with pytest.raises(AssertionError, match="2 for 3 rows"):
        run_on_store(lambda td: T.get_tensordict({"y": td.get("x")[:2]}), [make(3)], {}, keep)
    assert keep.puts == []


def test_padding_rows_are_marked_and_never_written():
    keep = store(3)

    def score(td):
        assert td.get(PADDING_COLUMN).tolist() == [False, False, False, True] and td.get("x").tolist() == [0, 1, 2, 0]
        return T.get_tensordict({"y": td.get("x") + 1, PADDING_COLUMN: td.get(PADDING_COLUMN)})

    run_on_store(score, [make(3)], {}, keep, pad_to=4)
    assert keep.puts == [(make(3).keys, ["y"])] and "A_3_0" not in keep.columns["y"]


def test_other_results_pass_through():
    assert run_on_store(lambda td: {"loss": 1}, [make(1)], {}, store(1)) == {"loss": 1}
    only_scalars = run_on_store(lambda td: T.get_tensordict({}, {"loss": 1}), [make(1)], {}, store(1))
    assert only_scalars.extra_info == {"loss": 1}


def test_collect_restores_keys_and_tags_and_lists_extra_info():
    meta = make(4, fields=["x"])
    parts = meta.chunk(2)
    parts[0].extra_info["loss"], parts[1].extra_info["loss"] = 1, 2
    out = collect([parts[0], None, parts[1], None], meta)
    assert (out.keys, out.tags, out.fields, out.extra_info) == (meta.keys, meta.tags, ["x"], {"loss": [1, 2]})


def test_collect_refuses_nothing_and_missing_rows():
    for results in ([], [None]):
        with pytest.raises(ValueError):
            collect(results, make(2))
    with pytest.raises(ValueError, match="1 rows for 2"):
        collect(make(2).chunk(2)[:1], make(2))

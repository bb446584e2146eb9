"""Dataset, collate and loader of the one-process flow."""

import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.config.data import DataConfig
from streamrl.data import PromptLoader, RLHFDataset, collate_fn
from streamrl.data.order import epoch_order, prompt_order
from streamrl.errors import CheckpointError, ConfigError, DataError, ProtocolError
from tests.data.worlds import row, write_jsonl


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "t.jsonl"
    rows = [{"prompt": [{"role": "user", "content": str(i)}], "data_source": "s", "extra_info": {"index": i} if i else None} for i in range(10)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return RLHFDataset(str(path), DataConfig())


def test_a_row_has_messages_and_no_token_ids(dataset):
    row = dataset[0]
    assert row["raw_prompt"] == [{"role": "user", "content": "0"}] and row["extra_info"] == {} and row["index"] == 0
    assert row["dummy_tensor"].dtype == torch.uint8 and row["dummy_tensor"].shape == (1,)
    assert not {"input_ids", "attention_mask", "raw_prompt_ids"} & set(row)


def test_mutating_a_row_does_not_change_later_reads(dataset):
    dataset[1]["raw_prompt"][0]["content"] = "changed"
    dataset[1]["extra_info"]["index"] = 99
    assert dataset[1]["raw_prompt"][0]["content"] == "1" and dataset[1]["index"] == 1


def test_split_gives_consecutive_equal_parts(dataset):
    parts = dataset.split(3)
    assert [[row["index"] for row in (part[i] for i in range(len(part)))] for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [parts[1].split(3)[2][0]["index"]] == [5]
    for k in (0, -1, 2.0, True, 11):
        with pytest.raises(ValueError):
            dataset.split(k)


def test_pickle_carries_no_rows_and_reads_them_again(dataset):
    part = dataset.split(2)[1]
    blob = pickle.dumps(part)
    assert b"role" not in blob
    assert pickle.loads(blob)[0]["index"] == 5


def test_two_rows_collate_to_one_element_per_row(dataset):
    batch = collate_fn([dataset[0], dataset[1]])
    assert batch["dummy_tensor"].shape == (2, 1) and batch["dummy_tensor"].dtype == torch.uint8
    assert batch["raw_prompt"].shape == (2,) and batch["raw_prompt"].dtype == object and batch["data_source"].shape == (2,)


cells = st.recursive(
    st.none() | st.integers() | st.text(max_size=3) | st.integers(0, 3).map(np.zeros),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.lists(cells, min_size=1, max_size=4), st.lists(cells, min_size=1, max_size=4))
def test_a_column_has_one_element_per_row_whatever_meets_in_a_batch(first, second):
    columns = [collate_fn([{"x": value} for value in values])["x"] for values in (first, second)]
    for column, values in zip(columns, (first, second), strict=True):
        assert column.shape == (len(values),) and column.dtype == object
        assert all(got is value for got, value in zip(column, values, strict=True))
    assert np.concatenate(columns).shape == (len(first) + len(second),)


@pytest.mark.parametrize("values", [[[1, 2, 3], [4, 5, 6]], [[], []], [np.zeros(3), np.ones(3)], [{"a": 1}, {"a": 2}], [[[1]], [[2]]]])
def test_equal_lengths_do_not_collapse_into_a_second_axis(values):
    column = collate_fn([{"x": value} for value in values])["x"]
    assert column.shape == (2,) and all(got is value for got, value in zip(column, values, strict=True))


def test_tensors_of_different_shapes_and_an_empty_batch_are_named():
    with pytest.raises(ProtocolError, match=r"\(2,\).*\(3,\).*'x'"):
        collate_fn([{"x": torch.zeros(2)}, {"x": torch.zeros(3)}])
    with pytest.raises(ProtocolError, match="got none"):
        collate_fn([])


def test_differing_keys_and_half_tensor_columns_are_named():
    with pytest.raises(ProtocolError, match="'b'"):
        collate_fn([{"a": 1}, {"a": 1, "b": 2}])
    with pytest.raises(ProtocolError, match="'a'"):
        collate_fn([{"a": torch.zeros(1)}, {"a": 1}])


def loader_of(dataset, **kwargs):
    return PromptLoader(dataset, **{"batch_size": 4, "shuffle": True, "seed": 3, **kwargs})


@pytest.fixture
def mixed(tmp_path):
    """7 rows of one file and 3 of another; a row's index is its number over both."""
    files = [write_jsonl(tmp_path / f"{i}.jsonl", [row(j) for j in numbers]) for i, numbers in enumerate((range(7), range(7, 10)))]
    return RLHFDataset(files, DataConfig())


def batches(loader, epochs):
    return [(loader.epoch, [int(i) for i in batch["index"]]) for _ in range(epochs) for batch in loader]


def test_loader_follows_the_order_of_the_prompt_stream(dataset):
    loader = loader_of(dataset, batch_size=1)
    for epoch in range(2):
        assert [int(batch["index"][0]) for batch in loader] == epoch_order(10, shuffle=True, seed=3, epoch=epoch)


KINDS = [
    {"shuffle": False},
    {"shuffle": True},
    {"shuffle": True, "weights": [1, 2]},
    {"shuffle": False, "weights": [5, 1]},
    {"shuffle": True, "drop_last": False},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("done", range(7))
def test_loader_resumes_exactly_at_every_boundary(mixed, done, kind):
    """10 rows in batches of 4: steps 0 to 6 are the start, mid-epoch, an epoch's last batch and the next one's first, twice over."""
    expected = batches(loader_of(mixed, **kind), 4)
    loader = loader_of(mixed, **kind)
    for _ in range(done):
        next(iter(loader))
    resumed = loader_of(mixed, **kind)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    got = batches(resumed, 4)
    assert got[: len(expected) - done] == expected[done:]


def test_a_multi_worker_loader_gives_the_same_batches_and_resumes_mid_epoch(mixed):
    """Workers fetch ahead; the saved position counts what was handed out, not what was fetched."""
    expected = batches(loader_of(mixed, batch_size=2), 2)
    loader = loader_of(mixed, batch_size=2, num_workers=2)
    it = iter(loader)
    assert [[int(i) for i in next(it)["index"]] for _ in range(3)] == [rows for _, rows in expected[:3]]
    state = loader.state_dict()
    del it
    resumed = loader_of(mixed, batch_size=2, num_workers=2)
    resumed.load_state_dict(state)
    assert batches(resumed, 2)[:7] == expected[3:]


def test_resume_at_the_end_of_an_epoch_runs_the_whole_next_one(tmp_path):
    dataset = RLHFDataset(write_jsonl(tmp_path / "t.jsonl", [row(i) for i in range(12)]), DataConfig())
    loader = loader_of(dataset)
    assert len(list(loader)) == 3
    resumed = loader_of(dataset)
    resumed.load_state_dict(loader.state_dict())
    got = batches(resumed, 1)
    assert [epoch for epoch, _ in got] == [1, 1, 2] and sorted(i for _, rows in got for i in rows) == list(range(12))


def test_resume_in_the_second_epoch_keeps_its_permutation(dataset):
    whole = batches(loader_of(dataset, batch_size=2), 2)
    loader = loader_of(dataset, batch_size=2)
    for _ in range(5 + 3):
        next(iter(loader))
    resumed = loader_of(dataset, batch_size=2)
    resumed.load_state_dict(loader.state_dict())
    rest = batches(resumed, 1)
    seen = [i for _, rows in (*whole[5:8], *rest) for i in rows]
    assert sorted(seen) == list(range(10)) and rest == whole[8:]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch_size": 5}, "batch_size: saved 4, now 5"),
        ({"seed": 4}, "seed: saved 3, now 4"),
        ({"weights": [2, 1]}, r"weights: saved \[1, 2\], now \[2, 1\]"),
        ({"shuffle": False}, "shuffle: saved True, now False"),
        ({"drop_last": False}, "drop_last: saved True, now False"),
    ],
)
def test_a_place_is_restored_only_onto_a_loader_of_the_same_order_and_batches(mixed, change, said):
    state = loader_of(mixed, weights=[1, 2]).state_dict()
    with pytest.raises(CheckpointError, match=said):
        loader_of(mixed, **{"weights": [1, 2], **change}).load_state_dict(state)


def test_other_rows_of_equal_number_are_no_home_for_a_place(tmp_path):
    datasets = [RLHFDataset(write_jsonl(tmp_path / f"{i}.jsonl", [row(i + j) for j in range(8)]), DataConfig()) for i in range(2)]
    with pytest.raises(CheckpointError, match="fingerprint: saved"):
        loader_of(datasets[1]).load_state_dict(loader_of(datasets[0]).state_dict())
    assert datasets[0].fingerprint == pickle.loads(pickle.dumps(datasets[0])).fingerprint


@pytest.mark.parametrize("change", [{"batches": -1}, {"batches": 2}, {"epoch": -1}, {"epoch": None}, {"epoch": True}, {"batches": 0.5}])
def test_a_place_outside_of_the_data_is_refused(dataset, change):
    with pytest.raises(CheckpointError, match="a data cursor has an epoch of at least 0 and batches of 0 to 1"):
        loader_of(dataset).load_state_dict(loader_of(dataset).state_dict() | change)


@pytest.mark.parametrize("state", [{"x": 1}, {"epoch": 0, "batches": 0}, [], None])
def test_what_is_no_place_is_a_checkpoint_error(dataset, state):
    with pytest.raises(CheckpointError):
        loader_of(dataset).load_state_dict(state)


def test_a_mixed_loader_follows_the_mixed_order(mixed):
    loader = loader_of(mixed, batch_size=1, weights=[1, 3])
    for epoch in range(3):
        assert [int(batch["index"][0]) for batch in loader] == prompt_order([7, 3], [1, 3], shuffle=True, seed=3, epoch=epoch)


def test_a_mixture_that_cannot_be_kept_is_refused(mixed):
    for weights in ([-1, 2], [0, 0], [float("nan"), 1], [1, float("inf")], ["1", 1]):
        with pytest.raises(DataError, match=r"weights are finite and above 0, got \["):
            loader_of(mixed, weights=weights)
    for weights, said in (([1], "1 for 2 files"), ([1, 1000], r"none for train_files\[0\]")):
        with pytest.raises(DataError, match=said):
            loader_of(mixed, weights=weights)


def test_a_split_knows_which_files_its_rows_are_of(mixed):
    parts = mixed.split(2)
    assert [part.sizes for part in parts] == [[5, 0], [2, 3]]
    assert [part.sizes for part in parts[1].split(2)] == [[2, 0], [0, 2]]
    assert pickle.loads(pickle.dumps(parts[1])).sizes == [2, 3]


def test_max_samples_is_a_seeded_choice_over_all_files(mixed, tmp_path):
    files = [str(tmp_path / f"{i}.jsonl") for i in range(2)]
    chosen = [RLHFDataset(files, DataConfig(), seed=seed, max_samples=6) for seed in (1, 1, 2)]
    indices = [[one[i]["index"] for i in range(len(one))] for one in chosen]
    assert indices[0] == indices[1] != indices[2] and len(set(indices[0])) == sum(chosen[0].sizes) == 6
    first = RLHFDataset(files, DataConfig(shuffle=False), max_samples=8)
    assert [first[i]["index"] for i in range(8)] == list(range(8)) and first.sizes == [7, 1]


def test_validation_loader_drops_nothing(dataset):
    sizes = [len(batch["index"]) for batch in loader_of(dataset, shuffle=False, drop_last=False)]
    assert sizes == [4, 4, 2]


def test_measuring_prompts_needs_a_tokenizer(tmp_path):
    with pytest.raises(ConfigError, match=r"\$\.data\.filter_overlong_prompts: measuring prompts needs a tokenizer, got none"):
        RLHFDataset(write_jsonl(tmp_path / "t.jsonl", [row(0)]), DataConfig(filter_overlong_prompts=True))


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, True, None])
def test_a_batch_has_a_whole_number_of_rows(dataset, batch_size):
    for drop_last in (True, False):
        with pytest.raises(ValueError, match="a batch has at least one row, got batch_size="):
            loader_of(dataset, batch_size=batch_size, drop_last=drop_last)


def test_a_batch_larger_than_the_data_is_refused(dataset):
    with pytest.raises(ValueError, match="10 rows for batches of 11"):
        loader_of(dataset, batch_size=11)

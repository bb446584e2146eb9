"""Dataset, collate and loader of the one-process flow."""

import json
import pickle

import numpy as np
import pytest
import torch

from streamrl.config.data import DataConfig
from streamrl.data import PromptLoader, RLHFDataset, collate_fn
from streamrl.data.order import epoch_order
from streamrl.errors import ProtocolError


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


@pytest.mark.parametrize("values", [[[1, 2, 3], [4, 5, 6]], [[], []], [np.zeros(3), np.ones(3)], [{"a": 1}, {"a": 2}], [[[1]], [[2]]]])
def test_equal_lengths_do_not_collapse_into_a_second_axis(values):
    column = collate_fn([{"x": value} for value in values])["x"]
    assert column.shape == (2,) and all(got is value for got, value in zip(column, values, strict=True))
    assert np.concatenate([column, column]).shape == (4,)


def test_differing_keys_and_half_tensor_columns_are_named():
    with pytest.raises(ProtocolError, match="'b'"):
        collate_fn([{"a": 1}, {"a": 1, "b": 2}])
    with pytest.raises(ProtocolError, match="'a'"):
        collate_fn([{"a": torch.zeros(1)}, {"a": 1}])


def loader_of(dataset, **kwargs):
    return PromptLoader(dataset, **{"batch_size": 4, "shuffle": True, "seed": 3, **kwargs})


def batches(loader, epochs):
    return [(loader.epoch, [int(i) for i in batch["index"]]) for _ in range(epochs) for batch in loader]


def test_loader_follows_the_order_of_the_prompt_stream(dataset):
    loader = loader_of(dataset, batch_size=1)
    for epoch in range(2):
        assert [int(batch["index"][0]) for batch in loader] == epoch_order(10, shuffle=True, seed=3, epoch=epoch)


@pytest.mark.parametrize("done", range(7))
def test_loader_resumes_exactly_at_every_boundary(dataset, done):
    expected = batches(loader_of(dataset), 4)
    loader = loader_of(dataset)
    for _ in range(done):
        next(iter(loader))
    resumed = loader_of(dataset)
    resumed.load_state_dict(loader.state_dict())
    got = batches(resumed, 4)
    assert got[: len(expected) - done] == expected[done:]


def test_validation_loader_drops_nothing(dataset):
    sizes = [len(batch["index"]) for batch in loader_of(dataset, shuffle=False, drop_last=False)]
    assert sizes == [4, 4, 2]


def test_a_batch_larger_than_the_data_is_refused(dataset):
    with pytest.raises(ValueError, match="10 rows for batches of 11"):
        loader_of(dataset, batch_size=11)

"""Rows that would end a run when they travel are refused when they are read, with the place of the value inside the row."""

import asyncio
import json
import time

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config.data import DataConfig
from streamrl.data import PromptStream, RLHFDataset, check_files
from streamrl.data.files import read_rows
from streamrl.data.rows import wire_custom_row, wire_row
from streamrl.data.wire import DATASET_COLUMNS, MAX_DEPTH, TRAJECTORY_COLUMNS, check_wire, fingerprint
from streamrl.errors import DataError
from streamrl.protocol.dispatch import PADDING_COLUMN
from streamrl.protocol.fields import TRAJECTORY_FIELDS, trajectory_columns
from streamrl.rollout.output_checks import LOOP_KEYS
from streamrl.testing.rows import make_trajectory
from tests.data.worlds import row, write_jsonl


def nested(depth):
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value


UNSENDABLE = [
    (row(1, prompt=[{"role": "user", "content": "x\ud800"}]), r"field 'prompt\[0\]\.content' is text of whole characters, got half of a surrogate pair"),
    (row(1, **{"a\ud800": 1}), r"field 'a\\ud800' is text of whole characters"),
    (row(1, extra_info={"index": 2**80}), r"field 'extra_info\.index' is an integer of at most 64 bits, got one of 81 bits"),
    (row(1, reward_model={"ground_truth": [1, 2**80]}), r"field 'reward_model\.ground_truth\[1\]' is an integer of at most 64 bits.*write it as text"),
    (row(1, deep=nested(900)), f"nests objects and lists at most {MAX_DEPTH} deep, got more in field 'deep'"),
]


@pytest.mark.parametrize(("bad", "said"), UNSENDABLE, ids=["surrogate", "name", "index", "truth", "depth"])
def test_a_row_that_cannot_travel_is_refused_before_the_start_with_the_path_of_its_field(tmp_path, bad, said):
    path = write_jsonl(tmp_path / "t.jsonl", [row(0), bad])
    for read in (check_files, lambda data: PromptStream(data, run_seed=1, total_epochs=1), lambda data: RLHFDataset(path, data)):
        with pytest.raises(DataError, match=rf"t\.jsonl, row 1 \(counting from 0\), line 2: .*{said}"):
            read(DataConfig(train_files=path))


@pytest.mark.parametrize("kind", [pa.timestamp, pa.duration])
def test_columns_in_nanoseconds_are_refused_and_other_dates_become_text(tmp_path, kind):
    path = tmp_path / "t.parquet"
    table = pa.Table.from_pylist([row(0), row(1)])
    pq.write_table(table.append_column("when", pa.array([1000, None], kind("ns"))), path)
    with pytest.raises(DataError, match=r"row 0 \(counting from 0\): field 'when' is text, a number, a list or an object, got Time.*convert the column"):
        check_files(DataConfig(train_files=str(path)))
    pq.write_table(table.append_column("when", pa.array([1, None], kind("us"))), path)
    first, second = read_rows(str(path), DataConfig())
    assert isinstance(wire_row(first, DataConfig())["when"], str) and wire_row(second, DataConfig())["when"] is None


@pytest.mark.parametrize("name", sorted(DATASET_COLUMNS | TRAJECTORY_COLUMNS))
def test_columns_that_the_house_writes_are_refused_by_name(tmp_path, name):
    path = write_jsonl(tmp_path / "t.jsonl", [row(0), row(1) | {name: 77}])
    with pytest.raises(DataError, match=rf"row 1 .*field '{name}' is written by the .*, got a column of that name; rename the column"):
        check_files(DataConfig(train_files=path))


def test_every_column_that_a_trajectory_gets_is_reserved():
    made = trajectory_columns([make_trajectory()]).keys()
    assert made | TRAJECTORY_FIELDS.keys() | LOOP_KEYS | {PADDING_COLUMN} <= TRAJECTORY_COLUMNS


def test_a_prompt_column_may_be_called_what_it_becomes(tmp_path):
    rows = [{**row(i), "raw_prompt": [{"role": "user", "content": f"{i}"}]} for i in range(2)]
    for one in rows:
        del one["prompt"]
    stream = PromptStream(DataConfig(train_files=write_jsonl(tmp_path / "t.jsonl", rows), prompt_key="raw_prompt", shuffle=False), run_seed=1, total_epochs=1)
    assert [prompt.row["raw_prompt"][0]["content"] for prompt in asyncio.run(stream.next_prompts(2))] == ["0", "1"]


def test_a_row_of_a_dataset_class_may_have_the_columns_of_a_dataset_but_not_of_a_trajectory():
    assert wire_custom_row(row(0) | {"index": 77}, DataConfig())["index"] == 77
    for bad, said in ((row(0, responses=[1]), "'responses' is written"), (row(0, x=np.int64(1), y=[2**80]), r"field 'y\[0\]'"), (row(0, z=nested(200)), "'z'")):
        with pytest.raises(DataError, match=said):
            wire_custom_row(bad, DataConfig())


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**66), 2**66) | st.floats(allow_nan=False) | st.text(st.characters(), max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(), max_size=2), inner, max_size=2),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from("abc"), values))
def test_what_passes_is_what_msgpack_gives_back_and_the_rest_is_a_data_error(stored):
    try:
        check_wire(stored)
    except DataError:
        with pytest.raises((UnicodeError, OverflowError)):
            msgspec.msgpack.encode(stored)
    else:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(stored)) == stored


def test_a_fingerprint_is_of_the_rows_in_their_order_and_not_of_the_order_of_columns():
    rows = [row(0), row(1)]
    assert fingerprint(rows) == fingerprint([dict(reversed(one.items())) for one in rows])
    assert len({fingerprint(other) for other in (rows, rows[::-1], rows[:1], [row(0), row(2)], [])}) == 5


def test_ten_thousand_rows_are_tried_in_a_fraction_of_a_second():
    rows = [row(i, extra_info={"index": i, "tools_kwargs": {"add": {"create_kwargs": {"a": [1, 2, 3]}}}}) for i in range(10_000)]
    start = time.process_time()
    for one in rows:
        check_wire(one)
    fingerprint(rows)
    assert time.process_time() - start < 0.6


def test_optional_columns_are_null_in_the_other_rows_of_all_files(tmp_path):
    files = [write_jsonl(tmp_path / "a.jsonl", [row(0), row(1, note="x")]), str(tmp_path / "b.json")]
    (tmp_path / "b.json").write_text(json.dumps([row(2, level=3)]))
    rows = read_rows(files, DataConfig())
    assert [(one["note"], one["level"]) for one in rows] == [(None, None), ("x", None), (None, 3)]

"""Where a fault stands: rows count from 0, lines from 1; and what a parquet map becomes."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamrl.config.data import DataConfig
from streamrl.data import RLHFDataset, check_files
from streamrl.data.files import read_rows
from streamrl.errors import DataError
from tests.data.worlds import row, write_jsonl


def refusal(path) -> str:
    with pytest.raises(DataError) as error:
        check_files(DataConfig(train_files=str(path)))
    return str(error.value)


def test_blank_lines_are_lines_and_no_rows(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n" + json.dumps(row(0)) + "\r\n\n" + json.dumps({"prompt": []}) + "\n")
    assert "t.jsonl, row 1 (counting from 0), line 4: field 'prompt'" in refusal(path)
    path.write_text("\n" + json.dumps(row(0)) + "\n\n{\n")
    assert "at row 1 (counting from 0), line 4: " in refusal(path)
    path.write_text(json.dumps(row(0)) + "\n" + "[" * 100_000)
    assert "at row 1 (counting from 0), line 2: " in refusal(path)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('[{"a": 1}, {"a": }]', "row 1"),
        ('[{"a": 1} {"a": 2}]', "row 0"),
        ('[{"a": 1},\n {"a": 2},\n', "row 2"),
        ('[{"a": 1}, {"a": 2},]', "row 2"),
        ('[{"a": [1, 2}]', "row 0"),
        ("[", "row 0"),
        ('{"a": 1', None),
        ("[] x", None),
        ("", None),
    ],
)
def test_a_malformed_json_file_names_the_row(tmp_path, text, place):
    (tmp_path / "t.json").write_text(text)
    said = refusal(tmp_path / "t.json")
    assert f"at {place} (counting from 0): " in said if place else "counting from 0" not in said and "JSONDecodeError" in said


def test_bytes_that_are_no_text_are_a_data_error(tmp_path):
    (tmp_path / "t.json").write_bytes(b'[{"a": "\xff"}]')
    assert "can't decode byte 0xff" in refusal(tmp_path / "t.json")


def test_map_columns_of_parquet_become_objects(tmp_path):
    maps = pa.array([[("a", 1), ("b", None)], []], pa.map_(pa.string(), pa.int64()))
    pq.write_table(pa.Table.from_pylist([row(0), row(1)]).append_column("scores", maps), tmp_path / "t.parquet")
    assert [one["scores"] for one in read_rows(str(tmp_path / "t.parquet"), DataConfig())] == [{"a": 1, "b": None}, {}]
    twice = pa.array([[("a", 1), ("a", 2)], []], pa.map_(pa.string(), pa.int64()))
    pq.write_table(pa.Table.from_pylist([row(0), row(1)]).append_column("scores", twice), tmp_path / "t.parquet")
    assert "must be readable as .parquet" in refusal(tmp_path / "t.parquet")


def test_paths_are_taken_and_an_empty_name_is_no_file(tmp_path):
    write_jsonl(tmp_path / "t.jsonl", [row(0)])
    for files in (tmp_path / "t.jsonl", [tmp_path / "t.jsonl"]):
        assert len(RLHFDataset(files, DataConfig())) == 1
    for nothing in ("", [""]):
        with pytest.raises(DataError, match=r"names at least one file, got \[''\]"):
            RLHFDataset(nothing, DataConfig())

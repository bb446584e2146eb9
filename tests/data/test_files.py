"""Files are read and refused before anything starts; every refusal names file, row, field and rule."""

import json
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamrl.config.data import DataConfig
from streamrl.data.files import check_files, read_rows
from streamrl.errors import DataError


def row(index=0, **columns):
    return {
        "data_source": "streamrl/tiny_add",
        "prompt": [{"role": "user", "content": f"{index}+1="}],
        "reward_model": {"style": "rule", "ground_truth": str(index + 1)},
        "extra_info": {"index": index},
        **columns,
    }


def write_jsonl(path, rows):
    path.write_text("\n".join(json.dumps(r) for r in rows))
    return str(path)


def refusal(tmp_path, rows):
    with pytest.raises(DataError) as error:
        check_files(DataConfig(train_files=write_jsonl(tmp_path / "t.jsonl", rows)))
    return str(error.value)


def test_all_formats_give_the_same_rows_in_the_given_order(tmp_path):
    rows = [row(i) for i in range(4)]
    pq.write_table(pa.Table.from_pylist(rows[:2]), tmp_path / "a.parquet")
    (tmp_path / "b.json").write_text(json.dumps(rows[2:3]))
    write_jsonl(tmp_path / "c.jsonl", rows[3:])
    assert read_rows([str(tmp_path / name) for name in ("a.parquet", "b.json", "c.jsonl")], DataConfig()) == rows


def test_json_rows_do_not_gain_the_keys_of_other_rows(tmp_path):
    schemas = [{"city": "string"}, {"a": "int", "b": "int"}]
    path = write_jsonl(tmp_path / "t.jsonl", [row(i, extra_info={"tools_kwargs": schema}) for i, schema in enumerate(schemas)])
    assert [r["extra_info"]["tools_kwargs"] for r in read_rows(path, DataConfig())] == schemas


def test_a_missing_file_is_named_as_given_and_as_resolved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"got data/none\.parquet \(looked for .*/data/none\.parquet\)"):
        read_rows("data/none.parquet", DataConfig())


def test_an_unknown_extension_is_named(tmp_path):
    with pytest.raises(DataError, match=r"\.csv"):
        read_rows(str(tmp_path / "x.csv"), DataConfig())


def test_no_file_and_no_row_are_refused(tmp_path):
    with pytest.raises(DataError, match="at least one file"):
        read_rows([], DataConfig())
    with pytest.raises(DataError, match="zero rows"):
        read_rows(write_jsonl(tmp_path / "e.jsonl", []), DataConfig())


def test_a_damaged_file_is_a_data_error(tmp_path):
    (tmp_path / "t.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"t\.parquet"):
        read_rows(str(tmp_path / "t.parquet"), DataConfig())
    (tmp_path / "t.jsonl").write_text('{"a": 1}\n{"a": ')
    with pytest.raises(DataError, match="line 2"):
        read_rows(str(tmp_path / "t.jsonl"), DataConfig())


def test_a_row_without_ground_truth_is_refused_with_its_number_and_its_keys(tmp_path):
    bad = {"prompt": [{"role": "user", "content": "q"}], "data_source": "x", "answer": "2"}
    message = refusal(tmp_path, [row(0), bad, row(2)])
    assert "t.jsonl, row 1" in message and "reward_model.ground_truth" in message and "answer, data_source, prompt" in message


def test_a_row_without_prompt_lists_its_keys(tmp_path):
    message = refusal(tmp_path, [row(0), {"question": "q", "answer": "2"}])
    assert "row 1" in message and "'prompt'" in message and "answer, question" in message


@pytest.mark.parametrize("prompt", ["2+2?", [], [{"role": "user"}], ["2+2?"], [{"role": None, "content": "x"}]])
def test_a_prompt_that_is_no_list_of_messages_is_refused(tmp_path, prompt):
    assert "row 1: field" in refusal(tmp_path, [row(0), row(1, prompt=prompt)])


def test_a_null_a_source_that_is_no_text_and_an_agent_that_is_no_name_are_shown(tmp_path):
    assert "row 0: field 'prompt'" in (message := refusal(tmp_path, [row(0, prompt=None)])) and "got null" in message
    assert "names the scorer in text, got 3" in refusal(tmp_path, [row(0, data_source=3)])
    assert "'agent_name' is the name of an agent loop, got ['a']" in refusal(tmp_path, [row(0, agent_name=["a"])])


def test_a_folder_and_endless_brackets_are_data_errors(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for name, said in (("", "list the files in it"), ("deep.json", "must be readable as .json")):
        with pytest.raises(DataError, match=said):
            check_files(DataConfig(train_files=str(tmp_path / name)))


def test_an_integer_truth_beyond_64_bits_is_refused_and_never_rounded(tmp_path):
    assert "write it as text" in refusal(tmp_path, [row(0, reward_model={"style": "rule", "ground_truth": 10**30})])


def test_summary_counts_rows_sources_and_agent_names(tmp_path):
    train = write_jsonl(tmp_path / "t.jsonl", [row(i, agent_name="single_turn_agent") for i in range(5)])
    val = write_jsonl(tmp_path / "v.jsonl", [row(i, data_source="openai/gsm8k") for i in range(2)])
    summary = check_files(DataConfig(train_files=train, val_files=val, max_samples=3))
    assert (summary.num_train_rows, summary.num_val_rows) == (3, 2)
    assert summary.sources == {"streamrl/tiny_add": 5, "openai/gsm8k": 2} and summary.agent_names == ["single_turn_agent"]


def test_ten_thousand_rows_are_checked_in_well_under_a_second(tmp_path):
    pq.write_table(pa.Table.from_pylist([row(i) for i in range(10_000)]), tmp_path / "t.parquet")
    data = DataConfig(train_files=str(tmp_path / "t.parquet"))
    start = time.process_time()
    check_files(data)
    assert time.process_time() - start < 1.0


def test_checking_the_shipped_files_imports_no_torch():
    code = (
        "import sys; from streamrl.config.data import DataConfig; import streamrl.data, streamrl.rewards, streamrl.rollout;"
        "streamrl.data.check_files(DataConfig(train_files='${streamrl}/assets/tiny/train.parquet', val_files='${streamrl}/assets/tiny/val.parquet'));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

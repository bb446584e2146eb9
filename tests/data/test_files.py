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
from streamrl.errors import ConfigError, DataError
from tests.data.worlds import row, schema, write_jsonl, write_tools


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


def differing_rows():
    """Two rows whose objects have no member in common: keyword arguments, a schema with nested properties, metadata, message keys."""
    schemas = [schema("weather", city="string"), schema("add", a="integer", b="integer")]
    rows = [
        row(
            i,
            extra_info={
                "index": i,
                "tools_kwargs": {one["function"]["name"]: {"create_kwargs": {key: i for key in one["function"]["parameters"]["properties"]}}},
                "schemas": [one],
                "meta": {f"only_{i}": {"deep": [{f"m{i}": i}]}},
            },
        )
        for i, one in enumerate(schemas)
    ]
    rows[0]["prompt"][0]["name"] = "ada"
    return rows


def through_pyarrow(rows, path):
    pq.write_table(pa.Table.from_pylist(rows), path)


def through_datasets(rows, path):
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).to_parquet(path)


@pytest.mark.parametrize("save", [through_pyarrow, through_datasets])
def test_parquet_rows_do_not_gain_the_members_of_other_rows(tmp_path, save):
    save(differing_rows(), tmp_path / "t.parquet")
    assert pq.read_table(tmp_path / "t.parquet").to_pylist() != differing_rows()
    assert read_rows(str(tmp_path / "t.parquet"), DataConfig()) == differing_rows()


def test_parquet_keeps_null_columns_null_elements_and_empty_objects(tmp_path):
    rows = [row(0, note=None, marks=[1, None], extra_info={"a": {}, "b": 1}), row(1, note="x", marks=[2], extra_info={"a": {"c": 1}, "b": 2})]
    through_pyarrow(rows, tmp_path / "t.parquet")
    assert read_rows(str(tmp_path / "t.parquet"), DataConfig()) == rows


def test_json_rows_do_not_gain_the_keys_of_other_rows(tmp_path):
    assert read_rows(write_jsonl(tmp_path / "t.jsonl", differing_rows()), DataConfig()) == differing_rows()


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
    with pytest.raises(DataError, match=r"row 1 \(counting from 0\), line 2"):
        read_rows(str(tmp_path / "t.jsonl"), DataConfig())


def test_a_row_without_ground_truth_is_refused_with_its_number_and_its_keys(tmp_path):
    bad = {"prompt": [{"role": "user", "content": "q"}], "data_source": "x", "answer": "2"}
    message = refusal(tmp_path, [row(0), bad, row(2)])
    assert "t.jsonl, row 1" in message and "reward_model.ground_truth" in message and "answer, data_source, prompt" in message


def test_a_row_without_prompt_lists_its_keys(tmp_path):
    message = refusal(tmp_path, [row(0), {"question": "q", "answer": "2"}])
    assert "row 1" in message and "'prompt'" in message and "answer, question" in message


@pytest.mark.parametrize("prompt", [[], [{"role": "user"}], ["2+2?"], [{"role": None, "content": "x"}], [{"role": "user", "content": ["x"]}]])
def test_a_prompt_that_is_no_list_of_messages_is_refused(tmp_path, prompt):
    assert "row 1 (counting from 0), line 2: field" in refusal(tmp_path, [row(0), row(1, prompt=prompt)])


@pytest.mark.parametrize("prompt", ["2+2?", "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", {"role": "user", "content": "2+2?"}])
def test_text_is_refused_as_a_wrong_type_and_never_templated(tmp_path, prompt):
    path = write_jsonl(tmp_path / "t.jsonl", [row(0), row(1, prompt=prompt, images=["a.png"])])
    with pytest.raises(TypeError, match=r"t\.jsonl, row 1 \(counting from 0\), line 2: field 'prompt' is a list of") as error:
        check_files(DataConfig(train_files=path))
    assert isinstance(error.value, DataError)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("text", "'extra_info' is an object"),
        ({"index": 1.5}, "'extra_info.index' is a number or text"),
        ({"tools_kwargs": ["a"]}, "'extra_info.tools_kwargs' is an object"),
        ({"interaction_kwargs": 1}, "'extra_info.interaction_kwargs'"),
        ({"need_tools_kwargs": "yes"}, "'extra_info.need_tools_kwargs' is true or false"),
    ],
)
def test_extra_info_of_a_wrong_shape_is_refused(tmp_path, extra, said):
    assert f"row 1 (counting from 0), line 2: field {said}" in refusal(tmp_path, [row(0), row(1, extra_info=extra)])


def save_json(rows, path):
    path.write_text(json.dumps(rows))


BAD_ROWS = [
    ({"prompt": None}, "field 'prompt' .*got null"),
    ({"prompt": []}, r"field 'prompt' is a non-empty list .*got \[\]"),
    ({"prompt": [{"role": "user", "content": None}]}, r"field prompt\[0\] has a text role and a content"),
    ({"data_source": None}, "field 'data_source' .*names the scorer.*got None"),
    ({"data_source": ""}, "field 'data_source' .*names the scorer.*got ''"),
    ({"reward_model": {"style": "rule", "ground_truth": None}}, "field 'reward_model.ground_truth' is required"),
    ({"reward_model": None}, "field 'reward_model.ground_truth' is required.*got the keys data_source, extra_info, prompt"),
]


@pytest.mark.parametrize("save", [through_pyarrow, save_json, lambda rows, path: write_jsonl(path, rows)], ids=["parquet", "json", "jsonl"])
def test_one_bad_row_in_ten_thousand_is_named_with_file_row_field_and_rule(tmp_path, save, request):
    path = tmp_path / f"t.{request.node.callspec.id}"
    rows = [row(i) for i in range(10_000)]
    for number, (columns, said) in enumerate(BAD_ROWS, start=9_000):
        line = f", line {number + 1}" if path.suffix == ".jsonl" else ""
        save([*rows[:number], row(number, **columns), *rows[number + 1 :]], path)
        with pytest.raises(DataError, match=rf"t\.{path.suffix[1:]}, row {number} \(counting from 0\){line}: {said}"):
            check_files(DataConfig(train_files=str(path)))


def test_a_bad_validation_row_and_a_bad_second_file_are_named_too(tmp_path):
    good, bad = write_jsonl(tmp_path / "a.jsonl", [row(0)]), write_jsonl(tmp_path / "b.jsonl", [row(0), {"prompt": "x"}])
    for files in ({"train_files": good, "val_files": bad}, {"train_files": [good, bad]}):
        with pytest.raises(DataError, match=r"b\.jsonl, row 1"):
            check_files(DataConfig(**files))


def test_the_file_of_tools_is_read_before_anything_starts(tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", [row(0)])
    check_files(DataConfig(train_files=path, tool_config_path=write_tools(tmp_path / "tools.yaml", schema("add"))))
    with pytest.raises(ConfigError, match=r"\$\.data\.tool_config_path: a readable YAML file"):
        check_files(DataConfig(train_files=path, tool_config_path=str(tmp_path / "none.yaml")))


def test_a_null_a_source_that_is_no_text_and_an_agent_that_is_no_name_are_shown(tmp_path):
    assert "row 0 (counting from 0), line 1: field 'prompt'" in (message := refusal(tmp_path, [row(0, prompt=None)])) and "got null" in message
    assert "names the scorer in text, got 3" in refusal(tmp_path, [row(0, data_source=3)])
    assert "'agent_name' is the name of an agent loop, got ['a']" in refusal(tmp_path, [row(0, agent_name=["a"])])
    for given in ("x", {"create_kwargs": [1]}):
        assert "'extra_info.tools_kwargs.add' is an object" in refusal(tmp_path, [row(0, extra_info={"tools_kwargs": {"add": given}})])
    assert "'__do_sample__' is true or false, got 'no'" in refusal(tmp_path, [row(0, __do_sample__="no")])
    assert "'__rollout_n__' is not taken" in refusal(tmp_path, [row(0, __rollout_n__=2)])


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

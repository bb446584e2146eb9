"""``streamrl inspect``: what a person reads of data, a run and a trajectory; every rule of the row's way broken once, named with its key."""

import asyncio
import contextlib
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from streamrl.cli.inspect import chosen_rows, find_sample
from streamrl.cli.inspect_print import Page
from streamrl.cli.inspect_run import SampledRow, run_layers, sampled_rows, update_layer
from streamrl.cli.inspect_tokens import rewarded_tokens, token_runs, visible
from streamrl.cli.main import main
from streamrl.config.load import dump, load
from streamrl.errors import DataError, UsageError
from streamrl.pipeline.local import run_local
from streamrl.protocol.tensors import index_select
from streamrl.protocol.tensors.columns import build, columns_of, object_stack
from streamrl.protocol.tensors.jagged import nested_from_list
from streamrl.telemetry.run_folder import RunFolder
from streamrl.telemetry.samples import Sample, read_sample, sample_paths, write_sample
from tests.pipeline.tiny import tiny_config

ROW = {"prompt": [{"role": "user", "content": "1+1"}], "data_source": "streamrl/tiny_add", "reward_model": {"style": "rule", "ground_truth": "2"}}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    """A run of the local pipeline: 4 steps of 2 groups of 3, of which one group of the last 3 steps is kept."""
    config = tiny_config("trainer.val_before_train=false", "telemetry.sample_steps=3", "data.val_files=[]", prompts=2, n=3, steps=4)
    root = tmp_path_factory.mktemp("runs") / "run"
    with RunFolder.create(root, dump(config)) as folder:
        asyncio.run(run_local(config, root))
    return folder


@pytest.fixture
def config(run):
    return load([run.config])


@pytest.fixture
def sample(run) -> Sample:
    return read_sample(sample_paths(run.samples)[4])


def doctored(sample: Sample, name: str, place: int, value) -> Sample:
    """The sample with one row of one column replaced."""
    rows = [row.clone() for row in sample.columns[name].unbind()]
    rows[place] = torch.as_tensor(value, dtype=rows[place].dtype)
    column = nested_from_list(rows) if sample.columns[name].is_nested else torch.stack(rows)
    return replace(sample, columns={**sample.columns, name: column})


def selected(sample: Sample, places: list[int]) -> Sample:
    columns = columns_of(index_select(build(sample.columns, len(sample.keys)), places))
    return replace(sample, keys=[sample.keys[i] for i in places], tags=[sample.tags[i] for i in places], columns=columns)


def broken(sample: Sample, config) -> dict[str, list[str]]:
    return {layer.name: list(layer.broken) for layer in run_layers(sample, config) if layer.broken}


def inspected(capsys, *words: str) -> tuple[int, str]:
    code = main(["inspect", *map(str, words)])
    return code, capsys.readouterr().out


def test_a_run_reads_ok_layer_by_layer(run, capsys):
    code, out = inspected(capsys, run.root)
    assert code == 0
    lines = [re.split(r"  +", line) for line in out.splitlines()[1:10]]
    assert [line[:5] for line in lines] == [
        ["prompt", "object", "data", "dataset row", "OK"],
        ["trajectory", "TensorDict", "data", "collate", "OK"],
        ["trajectory", "KVBatchMeta", "key", "keys", "OK"],
        ["trajectory", "KVBatchMeta", "key", "tags", "OK"],
        ["trajectory", "TensorDict", "data", "masks", "OK"],
        ["trajectory", "TensorDict", "data", "rewards", "OK"],
        ["trajectory", "TensorDict", "data", "advantages", "OK"],
        ["prompt", "group", "key", "groups", "OK"],
        ["trajectory", "mini-batch", "key", "update", "OK"],
    ]
    assert "1 uid, sessions per uid 3, expected n = 3" in out and "1 complete 3/3" in out
    assert "1 x (2 x 3 = 6 trajectories), DP size 1: 6 each" in out
    assert re.search(r"responses: +jagged rows=3 lengths=\[.*\] torch.int64 cpu", out) and re.search(r"uid: +object rows=3 of str", out)
    assert max(map(len, out.splitlines())) <= 100


def test_the_newest_steps_stay_and_hold_whole_groups_with_what_was_trained(run, sample):
    assert list(sample_paths(run.samples)) == [2, 3, 4]
    assert [path.name for path in sorted(run.samples.iterdir())] == ["step-000002.bin", "step-000003.bin", "step-000004.bin"]
    assert (sample.step, len(sample.keys), {key.rsplit("_", 2)[0] for key in sample.keys}) == (4, 3, {sample.keys[0].rsplit("_", 2)[0]})
    assert {"input_ids", "loss_mask", "old_log_probs", "advantages", "rm_scores", "raw_prompt", "reward_model"} <= sample.columns.keys()


@pytest.mark.parametrize(
    ("layer", "rule", "change"),
    [
        ("tags", "tag prompt_len counts", lambda s: replace(s, tags=[{**s.tags[0], "prompt_len": 999}, *s.tags[1:]])),
        ("tags", "tag response_len counts", lambda s: replace(s, tags=[{**s.tags[0], "response_len": 999}, *s.tags[1:]])),
        ("tags", "tag seq_len counts", lambda s: replace(s, tags=[{**s.tags[0], "seq_len": 999}, *s.tags[1:]])),
        ("tags", "tag max_global_steps", lambda s: replace(s, tags=[{**s.tags[0], "max_global_steps": 999}, *s.tags[1:]])),
        ("tags", "input_ids are prompts followed", lambda s: doctored(s, "input_ids", 0, s.columns["input_ids"][0] + 1)),
        ("masks", "have the length of responses", lambda s: doctored(s, "loss_mask", 0, [1] * 99)),
        ("masks", "masks hold 0 and 1", lambda s: doctored(s, "response_mask", 0, s.columns["response_mask"][0] * 2)),
        ("masks", "only tokens that the model wrote", lambda s: doctored(s, "response_mask", 0, [0, *s.columns["response_mask"][0][1:]])),
        ("masks", "a token that the model wrote, got", lambda s: doctored(s, "response_mask", 0, s.columns["response_mask"][0] * 0)),
        ("masks", "rollout_versions are -1 exactly", lambda s: doctored(s, "rollout_versions", 0, s.columns["rollout_versions"][0] * 0 - 1)),
        ("rewards", "rm_scores are finite", lambda s: doctored(s, "rm_scores", 0, s.columns["rm_scores"][0] * float("nan"))),
        ("advantages", "advantages are finite", lambda s: doctored(s, "advantages", 0, s.columns["advantages"][0] + float("inf"))),
        ("keys", "session ids are below", lambda s: replace(s, keys=[s.keys[0].replace("_0_0", "_3_0"), *s.keys[1:]])),
        ("keys", "are those of the key", lambda s: doctored(s, "session_id", 0, 2)),
        ("keys", "without a gap", lambda s: replace(doctored(s, "output_index", 0, 1), keys=[s.keys[0][:-1] + "1", *s.keys[1:]])),
        ("keys", "a key reads uid_session_index", lambda s: replace(s, keys=["nonsense", *s.keys[1:]])),
    ],
)
def test_a_broken_rule_is_named_with_its_key(sample, config, layer, rule, change):
    assert broken(sample, config) == {}
    changed = change(sample)
    lines = broken(changed, config)[layer]
    assert any(line.startswith(f"{changed.keys[0]}: ") and rule in line for line in lines), lines


def test_rewards_advantages_and_log_probs_lie_on_tokens_of_the_model(sample, config):
    size = 4
    columns = {
        "responses": torch.arange(size),
        "response_mask": torch.tensor([1, 1, 0, 1]),
        "loss_mask": torch.tensor([1, 1, 0, 0]),
        "rollout_versions": torch.tensor([3, 3, -1, 4], dtype=torch.int32),
        "rollout_log_probs": torch.tensor([-1.0, -1.0, 0.0, -1.0]),
        "rm_scores": torch.tensor([0.0, 0.0, 0.0, 1.0]),
        "advantages": torch.tensor([0.5, 0.5, 0.0, 0.0]),
    }
    one = Sample(1, 0, ["A_0_0"], [{}], {name: nested_from_list([value]) for name, value in columns.items()})
    own = ("masks", "rewards", "advantages")
    assert not broken(one, config).keys() & set(own)
    assert "only tokens" in broken(doctored(one, "loss_mask", 0, [1, 1, 1, 0]), config)["masks"][0]
    assert "rollout_log_probs are 0.0" in broken(doctored(one, "rollout_log_probs", 0, [-1, -1, -1, -1]), config)["masks"][0]
    assert "got one where response_mask is 0" in broken(doctored(one, "rm_scores", 0, [0, 0, 1, 0]), config)["rewards"][0]
    assert "where loss_mask is 0" in broken(doctored(one, "advantages", 0, [0.5, 0.5, 0, 0.5]), config)["advantages"][0]
    masks = next(layer for layer in run_layers(one, config) if layer.name == "masks")
    assert masks.found == "4 response tokens, 3 valid, 2 in the loss"


def test_a_short_a_missing_and_a_wrongly_typed_column_are_named(sample, config):
    short = replace(sample, columns={**sample.columns, "uid": object_stack(["A", "B"])})
    assert broken(short, config)["collate"] == [f"{sample.keys[2]}: dim 0 of every column is the number of keys (3), got 2 in 'uid'"]
    missing = replace(sample, columns={name: column for name, column in sample.columns.items() if name != "rm_scores"})
    assert broken(missing, config)["rewards"] == [f"{key}: a trajectory has the column 'rm_scores', got none" for key in sample.keys]
    cast = replace(sample, columns={**sample.columns, "advantages": nested_from_list([row.double() for row in sample.columns["advantages"].unbind()])})
    assert broken(cast, config) == {"collate": [f"{sample.keys[0]}: column 'advantages' is ragged float32, got float64"]}


def test_a_row_without_its_ground_truth_breaks_the_first_layer(sample, config):
    empty = replace(sample, columns={**sample.columns, "reward_model": object_stack([{}, {"ground_truth": "1"}, {"ground_truth": "1"}])})
    (line,) = broken(empty, config)["dataset row"]
    assert line.startswith(f"{sample.keys[0]}: field 'reward_model.ground_truth' is required")


def test_a_partial_group_says_how_many_and_one_session_is_too_few(sample, config):
    def groups(places):
        return next(layer for layer in run_layers(selected(sample, places), config) if layer.name == "groups")

    assert (groups([0, 1]).found, groups([0, 1]).broken) == ("1 PARTIAL 2/3", [])
    assert "2 (replay.min_sessions) to 3 (rollout.n) sessions, got 1" in groups([2]).broken[0]
    twice = selected(sample, [0, 1, 2, 2])
    several = replace(twice, keys=[*sample.keys, sample.keys[2][:-1] + "1"])
    several = doctored(several, "output_index", 3, 1)
    assert broken(several, config) == {}
    assert next(layer for layer in run_layers(several, config) if layer.name == "groups").found == "1 complete 3/3 in 4 rows"


def test_the_update_says_effective_mini_batch_dp_size_and_divisibility():
    def layer(*overrides):
        return update_layer(tiny_config(*overrides, prompts=8, n=3))

    assert layer("actor.ppo_mini_batch_size=4", "learner.ranks=2").found == "2 x (4 x 3 = 12 trajectories), DP size 2: 6 each"
    assert layer("learner.ranks=5").found.endswith("DP size 5: 4 or 5 each (not divisible)")
    assert layer("actor.ppo_mini_batch_size=3").broken == ["$.actor.ppo_mini_batch_size: data.train_batch_size (8) is a multiple of it, got 3"]


def test_a_broken_run_exits_with_1_and_counts_what_it_does_not_list(run, sample, tmp_path, capsys):
    folder = RunFolder(shutil.copytree(run.root, tmp_path / "copy"))
    many = selected(sample, [0, 1, 2, 0, 1, 2])
    keys = [*sample.keys, *(key.replace(key[:8], "other-id") for key in sample.keys)]
    write_sample(folder.samples, replace(many, step=9, keys=keys, tags=[{**tag, "prompt_len": 999} for tag in many.tags]))
    code, out = inspected(capsys, folder.root)
    assert code == 1
    assert re.search(r"KVBatchMeta  key   tags +BROKEN", out) and f"    {sample.keys[0]}: tag prompt_len" in out and "    and 3 more" in out
    assert inspected(capsys, folder.root, "--step", "3")[0] == 0


def test_a_key_shows_columns_and_the_conversation_a_uid_the_whole_group(run, sample, capsys):
    key = sample.keys[1]
    code, out = inspected(capsys, run.root, key)
    assert code == 0
    assert "responses: " in out and "jagged rows=1" in out and f"\n{key}\n" in out
    assert "-- prompt, " in out and "-- model, " in out and "<|im_start|>assistant" in out and "-- reward " in out
    code, out = inspected(capsys, run.root, key.rsplit("_", 2)[0])
    assert code == 0 and all(f"\n{name}\n" in out for name in sample.keys) and out.count("as above") == 2


def test_an_unknown_key_or_step_says_which_are_there(run, sample, capsys):
    assert main(["inspect", str(run.root), "nobody_0_0"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("streamrl: KEY is a trajectory or a uid of a sampled step, got 'nobody_0_0'") and sample.keys[0] in said and "and 1 more" in said
    with pytest.raises(UsageError, match="there are 2, 3, 4"):
        find_sample(run, None, 1)
    assert chosen_rows(find_sample(run, read_sample(sample_paths(run.samples)[2]).keys[0], None), "nobody") == []


@pytest.mark.parametrize("words", [("run", "--row", "1"), ("data.jsonl", "a_0_0"), ("data.jsonl", "--step", "1"), ("data.jsonl", "--row", "9")])
def test_options_that_do_not_fit_the_target_are_mistakes(words, run, tmp_path, capsys):
    (tmp_path / "data.jsonl").write_text(json.dumps(ROW) + "\n")
    target = run.root if words[0] == "run" else tmp_path / words[0]
    assert main(["inspect", str(target), *words[1:]]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_run_without_samples_and_a_damaged_sample_end_with_one_line(run, tmp_path, capsys):
    folder = RunFolder(shutil.copytree(run.root, tmp_path / "copy"))
    path = sample_paths(folder.samples)[4]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="damaged"):
        find_sample(folder, None, None)
    assert main(["inspect", str(folder.root)]) == 2 and capsys.readouterr().err.count("\n") == 1
    shutil.rmtree(folder.samples)
    assert main(["inspect", str(folder.root)]) == 2
    assert "telemetry.sample_groups is above 0, got none" in capsys.readouterr().err


# ---- tokens -----------------------------------------------------------------------------------------------------------------------------


def tool_row(scores=(0.0, 0.0, 0.0, 0.0, 1.0)) -> SampledRow:
    """Two model tokens, one observation, one model token that is not trained, one that is."""
    values = {
        "prompts": np.array([7, 8]),
        "responses": np.array([1, 2, 3, 4, 5]),
        "response_mask": np.array([1, 1, 0, 1, 1]),
        "loss_mask": np.array([1, 1, 0, 0, 1]),
        "rollout_versions": np.array([3, 4, -1, 4, 4]),
        "rm_scores": np.array(scores, np.float32),
    }
    return SampledRow("A_0_0", {}, values)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def conversation(page_file: io.StringIO, **options) -> str:
    Page(file=page_file, **options).conversation(tool_row(), lambda ids: " ".join(f"t{i}" for i in ids))
    return page_file.getvalue()


def test_tokens_are_cut_where_their_role_changes():
    runs = token_runs(tool_row())
    assert [(run.role, run.ids, run.versions) for run in runs] == [
        ("prompt", [7, 8], []),
        ("model", [1, 2], [3, 4]),
        ("observation", [3], []),
        ("not trained", [4], [4]),
        ("model", [5], [4]),
    ]
    assert rewarded_tokens(tool_row(scores=(0, 0.5, 0, 0, 1))) == [(2, 0.5), (5, 1.0)]


def test_tokens_are_coloured_by_mask_on_a_terminal_only(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = conversation(Terminal())
    for code, text in (("2", "t7 t8"), ("32", "t1 t2"), ("33", "t3"), ("4;31", "t4"), ("32", "t5")):
        assert f"\x1b[{code}m{text}\x1b[0m" in shown
    plain = conversation(io.StringIO())
    assert "\x1b" not in plain and plain == conversation(Terminal(), color=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert conversation(Terminal()) == plain
    assert plain.splitlines()[2:6] == ["-- model, 2 tokens, version 3..4", "t1 t2", "-- observation, 1 token", "t3"]
    assert plain.splitlines()[-1] == "-- reward 1 (+1 at token 5)"


def test_text_of_a_model_cannot_steer_the_terminal_and_pipes_are_not_wrapped():
    assert visible("a\x1b[31m\r\n\x9b") == "a\\x1b[31m\\r⏎\n\\x9b"
    out = io.StringIO()
    Page(file=out).line("word " * 60 + "[bold]:smile:")
    assert out.getvalue().count("\n") == 1 and "[bold]:smile:" in out.getvalue()


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_page_without_a_reader_is_left_to_the_command_line():
    with pytest.raises(BrokenPipeError):
        Page(file=Closed()).line("text")


def test_text_that_the_terminal_lacks_is_escaped(tmp_path):
    path = write_rows(tmp_path / "data.jsonl", {**ROW, "prompt": [{"role": "user", "content": "\u00e9"}]})
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with contextlib.redirect_stdout(out):
        assert main(["inspect", str(path), "--row", "0"]) == 0
    assert "-- user\n\\xe9\n" in out.buffer.getvalue().decode()


def test_without_the_model_ids_are_shown(run, sample, tmp_path, capsys):
    folder = RunFolder(shutil.copytree(run.root, tmp_path / "copy"))
    folder.config.write_text(re.sub(r"(?m)^  (path|tokenizer_path): .*assets/tiny/model.*$", rf"  \1: {tmp_path}/gone", folder.config.read_text()))
    code, out = inspected(capsys, folder.root, sample.keys[0])
    assert code == 0 and "ids instead of text: $.model.path" in out
    assert " ".join(map(str, sampled_rows(sample)[0]["responses"].tolist())) in out


# ---- data -------------------------------------------------------------------------------------------------------------------------------


def write_rows(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_data_reads_ok_layer_by_layer(tmp_path, capsys):
    path = write_rows(tmp_path / "data.jsonl", ROW, {**ROW, "data_source": "mine"}, ROW)
    code, out = inspected(capsys, path)
    assert code == 0
    lines = [re.split(r"  +", line) for line in out.splitlines()[1:6]]
    assert lines == [
        ["prompt", "dict", "data", "dataset row", "OK", "3 rows; reward_model 3, extra_info 0"],
        ["prompt", "dict", "data", "roles", "OK", "user 3"],
        ["prompt", "dict", "data", "sources", "OK", "streamrl/tiny_add 2, mine 1"],
        ["prompt", "dict", "data", "media", "OK", "text only"],
        ["prompt", "batch", "data", "collate", "OK", "1 tensor, dim 0 = 3; 8 object arrays, length 3"],
    ]
    assert "dummy_tensor:       dense shape=(3, 1) torch.uint8 cpu" in out and "raw_prompt:         object rows=3 of list" in out


def test_a_configuration_is_looked_at_with_its_own_names(tmp_path, capsys):
    write_rows(tmp_path / "data.jsonl", {"question": ROW["prompt"]})
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {{path: m}}\ndata: {{train_files: {tmp_path}/data.jsonl, prompt_key: question}}\n")
    assert main(["inspect", str(config)]) == 2  # scored by rules, it needs a source and a ground truth
    config.write_text(config.read_text() + f"reward: {{custom_reward_function: {{path: {tmp_path}/score.py}}}}\n")
    assert inspected(capsys, config)[0] == 0


def test_a_bad_row_is_the_error_of_the_start(tmp_path, capsys):
    path = write_rows(tmp_path / "data.jsonl", ROW, {**ROW, "prompt": []})
    assert main(["inspect", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"streamrl: {path}, row 1 (counting from 0), line 2: field 'prompt' is a non-empty list of")


def test_media_are_counted_and_a_row_in_full_counts_its_placeholders(tmp_path, capsys):
    media = {**ROW, "prompt": [{"role": "user", "content": "<image> or <image>?\x1b[2J"}], "images": ["a.png", "b.png"]}
    path = write_rows(tmp_path / "data.jsonl", media, ROW)
    code, out = inspected(capsys, path, "--row", "0")
    assert code == 0 and "image 2 in 1 row, 2 a row" in out
    assert "-- user\n<image> or <image>?\\x1b[2J\n-- image placeholders\n2 for 2 values of images\n" in out
    write_rows(path, {**media, "images": ["a.png"]})
    assert main(["inspect", str(path)]) == 2
    assert "row 0 (counting from 0), line 1: field 'prompt' has one <image> for every value of field 'images', got 2 and 1" in capsys.readouterr().err


def test_a_column_that_some_rows_lack_is_null_in_them(tmp_path, capsys):
    code, out = inspected(capsys, write_rows(tmp_path / "data.jsonl", ROW, {**ROW, "level": 3}), "--row", "0")
    assert code == 0 and re.search(r"level: +object rows=2 of ", out) and out.endswith("-- level\nNone\n")


def test_a_row_that_cannot_travel_is_the_error_of_the_start(tmp_path, capsys):
    for bad, said in (({"note": "x\ud800"}, "field 'note' is text of whole characters"), ({"uid": "mine"}, "field 'uid' is written by the run")):
        assert main(["inspect", str(write_rows(tmp_path / "data.jsonl", ROW, {**ROW, **bad}))]) == 2
        err = capsys.readouterr().err
        assert f"row 1 (counting from 0), line 2: {said}" in err and err.count("\n") == 1


def test_a_target_that_is_not_there_is_called_so(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "nope")]) == 2
    assert f"a data file, a configuration or a run folder, got {tmp_path}/nope, where there is none" in capsys.readouterr().err

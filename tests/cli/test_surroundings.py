"""What is refused before anything starts because of files outside the configuration: the model's, the score function's, the shared memory."""

import json
import shutil
from pathlib import Path

import pytest

import streamrl
from streamrl.cli.main import main
from streamrl.cli.model_folder import check_model
from streamrl.config.paths import resolve_model
from streamrl.config.rollout import ModelConfig
from streamrl.errors import ConfigError

TINY = Path(streamrl.__file__).parent / "assets/tiny/model"
CONFIG = """
data: {train_files: "${streamrl}/assets/tiny/val.parquet", train_batch_size: 4, max_prompt_length: 32, max_response_length: 8}
actor: {use_dynamic_bsz: true, ppo_mini_batch_size: 4}
rollout: {engine: scripted, n: 4}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(TINY, tmp_path / "model")


def refusal(path: object, **settings) -> str:
    with pytest.raises(ConfigError) as error:
        check_model(ModelConfig(path=resolve_model(str(path)), **settings))
    return str(error.value)


def test_a_whole_folder_and_hub_ids_pass(folder):
    for path in (str(folder), "gpt2", "owner/na-me_1.5"):
        assert check_model(ModelConfig(path=path)) == []


@pytest.mark.parametrize("path", ["/absent/model", "./absent", "a/b/c", "two words", "https://hub.example/owner/name"])
def test_a_path_that_is_neither_a_folder_nor_a_hub_id_is_refused(path):
    assert "$.model.path: must be" in refusal(path)


def test_a_file_is_no_model(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert "must be a folder" in refusal("config.json")


def test_a_folder_that_was_forgotten_is_not_taken_as_a_hub_id_in_silence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert "./models/mine" in check_model(ModelConfig(path="models/mine"))[0]


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", None, "holds config.json"),
        ("config.json", "{", "config.json must be readable JSON"),
        ("config.json", "[]", "must hold a JSON object"),
        ("config.json", "{}", "model_type"),
        ("model.safetensors", None, "holds its weights"),
        ("model.safetensors", "version https://git-lfs.github.com/spec/v1\n", "whole safetensors"),
        ("model.safetensors.index.json", json.dumps({"weight_map": {"a": "model-00002.safetensors"}}), "model-00002.safetensors"),
        ("tokenizer.json", None, "holds a tokenizer"),
        ("tokenizer.json", "version https", "tokenizer.json must be readable JSON"),
        ("tokenizer_config.json", "{", "tokenizer_config.json must be readable JSON"),
        ("chat_template.jinja", None, "has a chat template"),
        ("chat_template.jinja", " \n", "is not empty"),
    ],
)
def test_a_folder_that_could_not_be_loaded_is_refused(file, content, said, folder):
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    assert said in refusal(folder)


def test_weights_that_were_cut_off_are_refused(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "cut off" in refusal(folder)


def test_rows_longer_than_the_model_allows_are_refused_unless_its_positions_are_stretched(folder):
    settings = json.loads((folder / "config.json").read_text())
    limit = settings["max_position_embeddings"]
    assert check_model(ModelConfig(path=str(folder)), limit) == []
    with pytest.raises(ConfigError, match=rf"\$\.data\.max_response_length: .*allows {limit} tokens"):
        check_model(ModelConfig(path=str(folder)), limit + 1)
    (folder / "config.json").write_text(json.dumps(settings | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}))
    assert check_model(ModelConfig(path=str(folder)), limit + 1) == []


def test_the_template_may_stand_in_the_tokenizer_config_and_the_tokenizer_elsewhere(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "tokenizer")
    (folder / "chat_template.jinja").unlink()
    assert check_model(ModelConfig(path=str(folder), tokenizer_path=str(other))) == []
    assert "$.model.tokenizer_path" in refusal(other, tokenizer_path=str(folder))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "{{ messages }}"}))
    assert check_model(ModelConfig(path=str(folder))) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.path=/absent"], "$.model.path: must be an existing folder"),
        (["reward.custom_reward_function.path=absent.py"], "$.reward.custom_reward_function.path: must be an existing Python file"),
        (["reward.custom_reward_function.path=broken.py"], "must be a Python file"),
        (["reward.custom_reward_function.path=good.py", "reward.custom_reward_function.name=other"], "$.reward.custom_reward_function.name"),
        (["dataplane.shm_dir=absent"], "$.dataplane.shm_dir"),
        (['run.folder=""'], "$.run.folder: must not be empty"),
        (["rollout.n"], "write rollout.n=... in one word"),
    ],
)
@pytest.mark.parametrize("verb", ["check", "launch"])
def test_a_mistake_outside_the_configuration_is_one_line_and_leaves_no_run(verb, words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("def compute_score(:\n")
    Path("good.py").write_text("def compute_score(*_):\n    return 1.0\n")
    Path("config.yaml").write_text(CONFIG)
    assert main([verb, "config.yaml", f"model.path={TINY}", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
    assert not Path("runs").exists()
    assert main(["check", "config.yaml", f"model.path={TINY}", "reward.custom_reward_function.path=good.py"]) == 0


def test_an_engine_that_is_not_installed_is_named_with_what_installs_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    Path("config.yaml").write_text(CONFIG)
    assert main(["launch", "config.yaml", f"model.path={TINY}", "rollout.engine=vllm"]) == 2
    assert "$.rollout.engine: 'vllm' needs the package vllm" in capsys.readouterr().err

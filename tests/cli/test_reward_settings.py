"""Who scores which rows is known before anything starts."""

import json

import pytest

from streamrl.cli.settings import check_surroundings
from streamrl.config.paths import resolve
from streamrl.errors import ConfigError, DataError
from tests.pipeline.tiny import tiny_config

MODEL = resolve("${streamrl}/assets/tiny/model")
JUDGE = f"reward.judge.model_path={MODEL}"
CLASSIFIER = f"reward.reward_model={{enable: true, model_path: {MODEL}}}"


def rows(tmp_path, *styles, **columns):
    """A file with a row of each style; None: no style."""
    path = tmp_path / f"{'-'.join(map(str, styles))}.jsonl"
    made = [{"style": style} if style else {} for style in styles]
    lines = [{"prompt": [{"role": "user", "content": "1+1="}], "reward_model": style, **columns} for style in made]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def checked(tmp_path, *overrides, train=("model", "model"), val=()):
    files = [f"data.train_files={rows(tmp_path, *train)}", f"data.val_files={rows(tmp_path, *val, data_source='v') if val else []}"]
    return check_surroundings(tiny_config(*files, *overrides, prompts=2))


def test_rows_that_a_model_scores_need_no_source_and_no_truth(tmp_path):
    assert checked(tmp_path, JUDGE) == checked(tmp_path, CLASSIFIER) == checked(tmp_path, "reward.remote.url=http://x") == 2


def test_rows_that_a_model_scores_need_one(tmp_path):
    with pytest.raises(ConfigError, match=r"\$\.reward: needs a model for rows with reward_model.style=model, got 'none and 2 such rows'"):
        checked(tmp_path)


def test_a_model_needs_rows_that_it_scores(tmp_path):
    with pytest.raises(ConfigError, match=r"\$\.reward\.judge: scores rows with reward_model.style=model, and the data has none"):
        check_surroundings(tiny_config(JUDGE))


def test_rows_of_another_style_are_a_rule_s(tmp_path):
    with pytest.raises(DataError, match="'data_source'"):
        checked(tmp_path, JUDGE, train=("model", "rule-of-thumb"))
    with pytest.raises(DataError, match="'data_source'"):
        checked(tmp_path, JUDGE, train=("model", None))


def test_validation_rows_are_not_for_a_model_that_scores_after_the_rollout(tmp_path):
    assert checked(tmp_path, JUDGE, val=("model",)) == 2
    with pytest.raises(ConfigError, match=r"\$\.data\.val_files: validation is scored where it is generated"):
        checked(tmp_path, CLASSIFIER, val=("model",))


@pytest.mark.parametrize(
    ("name", "said"), [("breif", "known: dapo, gdpo, limited, naive"), ("no.such:Manager", "the module no.such"), ("textwrap:Nothing", "Nothing")]
)
def test_managers_are_known_by_name_or_place(name, said):
    with pytest.raises(ConfigError, match=rf"\$\.reward\.reward_manager: .*{said}"):
        check_surroundings(tiny_config(f"reward.reward_manager={name}"))


@pytest.mark.parametrize("key", ["judge", "reward_model"])
def test_a_model_s_folder_is_looked_at(tmp_path, key):
    path = tmp_path / "empty"
    path.mkdir()
    section = {"model_path": str(path)} | ({"enable": True} if key == "reward_model" else {})
    with pytest.raises(ConfigError, match=rf"\$\.reward\.{key}\.model_path: a model's folder holds config.json"):
        checked(tmp_path, f"reward.{key}={json.dumps(section)}")

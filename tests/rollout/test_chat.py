"""The shipped tokenizer, its template and its files."""

import pytest

from streamrl.config.data import DataConfig
from streamrl.config.paths import resolve
from streamrl.config.rollout import ModelConfig
from streamrl.data import check_files
from streamrl.errors import ConfigError, SessionFailed
from streamrl.protocol.chat import prompt_ids
from streamrl.rollout import load_tokenizer
from streamrl.rollout.sampling import call_budget

TINY = ModelConfig(path="${streamrl}/assets/tiny/model")


def test_a_tokenizer_is_loaded_once():
    assert load_tokenizer(TINY) is load_tokenizer(TINY)


def test_a_prompt_is_templated_once():
    tokenizer = load_tokenizer(TINY)
    text = tokenizer.decode(prompt_ids(tokenizer, [{"role": "user", "content": "12+7="}], {}))
    assert text == "<|im_start|>user\n12+7=<|im_end|>\n<|im_start|>assistant\n"


def test_answers_of_the_tiny_task_have_at_most_four_tokens_and_read_back_exactly():
    tokenizer = load_tokenizer(TINY)
    for total in range(59):
        ids = [*tokenizer(str(total))["input_ids"], tokenizer.eos_token_id]
        assert len(ids) <= 4 and tokenizer.decode(ids, skip_special_tokens=True) == str(total)


def test_the_tokenizer_keeps_every_printable_character():
    tokenizer = load_tokenizer(TINY)
    text = "".join(chr(code) for code in range(32, 127)) + "\n user  assistant"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_shipped_rows_pass_the_checks_and_no_validation_prompt_is_trained():
    folder = "${streamrl}/assets/tiny"
    data = DataConfig(train_files=f"{folder}/train.parquet", val_files=f"{folder}/val.parquet")
    summary = check_files(data)
    assert summary.sources.keys() == {"streamrl/tiny_add"} and summary.num_val_rows == 100

    from streamrl.data import read_rows

    train, val = ({row["prompt"][0]["content"] for row in read_rows(files, data)} for files in (data.train_files, data.val_files))
    assert not train & val


def test_a_folder_without_a_tokenizer_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"\$\.model\.path"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


def test_a_hub_id_stays_a_hub_id_and_paths_become_absolute(tmp_path, monkeypatch):
    from streamrl.config.paths import resolve_model

    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "x").mkdir(parents=True)
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert resolve_model("models/x") == str(tmp_path / "models" / "x")
    assert resolve("~/x").startswith("/") and resolve("x.parquet") == str(tmp_path / "x.parquet")


@pytest.mark.parametrize(("prompt_len", "used", "asked", "expected"), [(8, 0, 500, 6), (3, 0, 4, 4), (8, 5, 500, 1), (12, 0, 6, 2)])
def test_a_call_asks_for_what_is_left(prompt_len, used, asked, expected):
    assert call_budget(DataConfig(max_prompt_length=8, max_response_length=6), prompt_len=prompt_len, used=used, asked=asked) == expected


def test_a_call_without_room_is_overlong():
    with pytest.raises(SessionFailed) as error:
        call_budget(DataConfig(max_prompt_length=8, max_response_length=6), prompt_len=14, used=0, asked=6)
    assert (error.value.reason, error.value.retryable) == ("overlong", False)

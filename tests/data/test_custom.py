"""``data.custom_cls``: the prompt actor uses the class, the driver looks at its file without running it."""

import asyncio
import subprocess
import sys

import msgspec
import pytest

from streamrl.config.data import CustomClass, DataConfig
from streamrl.data import PromptStream, check_files
from streamrl.data.custom import load_class
from streamrl.errors import ConfigError, DataError, StreamrlError

CODE = """
import torch
from torch.utils.data import Dataset
from streamrl.data import RLHFDataset

class Shouting(RLHFDataset):
    def __getitem__(self, i):
        row = super().__getitem__(i)
        row["raw_prompt"][0]["content"] += "!"
        return {**row, "mine": i}

class Made(Dataset):
    def __init__(self, files, data, *, seed, max_samples, tokenizer):
        self.files, self.data, self.arguments = files, data, [seed, max_samples, tokenizer]
    def __len__(self):
        return 3
    def __getitem__(self, i):
        return {"prompt": [{"role": "user", "content": f"{self.files}{i}"}], "arguments": self.arguments, "tools_kwargs": {"t": i}}

class Broken(Made):
    def __getitem__(self, i):
        return {"prompt": "text"} if i == 1 else super().__getitem__(i)

class Tensors(Made):
    def __getitem__(self, i):
        return {**super().__getitem__(i), "ids": torch.zeros(2)}

class Empty(Made):
    def __len__(self):
        return 0

class Stranger:
    pass

number = 1
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)
    return str(tmp_path / "mine.py")


def stream_of(path, name, files="made", **data):
    custom = CustomClass(path=path, name=name)
    return PromptStream(DataConfig(train_files=files, custom_cls=custom, shuffle=False, **data), run_seed=7, total_epochs=1, tokenizer=None)


def take(stream):
    return [prompt.row for prompt in asyncio.run(stream.next_prompts(100))]


def test_a_subclass_of_the_dataset_hands_out_its_own_rows(path, tmp_path):
    from tests.data.worlds import row, write_jsonl

    rows = take(stream_of(path, "Shouting", write_jsonl(tmp_path / "t.jsonl", [row(0), row(1)])))
    assert [r["raw_prompt"] for r in rows] == [[{"role": "user", "content": f"{i}+1=!"}] for i in range(2)]
    assert [r["mine"] for r in rows] == [0, 1] and not {"dummy_tensor", "prompt"} & set(rows[0])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(rows)) == rows


def test_a_class_of_its_own_gets_the_arguments_and_may_leave_out_what_can_be_derived(path):
    rows = take(stream_of(path, "Made", max_samples=2))
    assert [r["raw_prompt"][0]["content"] for r in rows] == ["made0", "made1", "made2"]
    assert rows[1]["arguments"] == [7, 2, None] and rows[1]["tools_kwargs"] == {"t": 1} and rows[1]["extra_info"] == {} and rows[1]["index"] == 0


def test_it_makes_the_validation_rows_too(path):
    rows = asyncio.run(stream_of(path, "Made", val_files=["v"]).validation_rows())
    assert [r["raw_prompt"][0]["content"] for r in rows] == ["['v']0", "['v']1", "['v']2"]


def test_what_is_no_dataset_is_a_type_error(path):
    for name in ("Stranger", "number", "Dataset.__init__"):
        with pytest.raises(ConfigError if "." in name else TypeError) as error:
            load_class(CustomClass(path=path, name=name))
        assert isinstance(error.value, StreamrlError) and name in str(error.value)


def test_bad_rows_are_named_when_they_are_handed_out(path):
    with pytest.raises(DataError, match=r"row 1 of Broken: field 'prompt'"):
        take(stream_of(path, "Broken"))
    with pytest.raises(DataError, match=r"row 0 of Tensors: .*got Tensor"):
        take(stream_of(path, "Tensors"))
    with pytest.raises(DataError, match="zero rows of Empty"):
        stream_of(path, "Empty")


def test_the_driver_checks_file_and_name_without_torch_and_without_running_it(path, tmp_path):
    (tmp_path / "loud.py").write_text("raise SystemExit('was run')\nclass Loud: pass\n")
    code = (
        "import sys; from streamrl.config.data import CustomClass, DataConfig; from streamrl.data import check_files;"
        f"s = check_files(DataConfig(train_files='nowhere', custom_cls=CustomClass(path={str(tmp_path / 'loud.py')!r}, name='Loud')));"
        "assert s.num_train_rows is None and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(("file", "name", "said"), [("none.py", "Made", r"custom_cls\.path: must be an existing"), ("bad.py", "Made", "must be a Python file")])
def test_an_absent_or_broken_file_is_refused(tmp_path, file, name, said):
    (tmp_path / "bad.py").write_text("class (")
    with pytest.raises(ConfigError, match=said):
        check_files(DataConfig(custom_cls=CustomClass(path=str(tmp_path / file), name=name)))


def test_an_absent_name_is_refused(path):
    with pytest.raises(ConfigError, match=r"\$\.data\.custom_cls\.name: must be a class of .*got 'Mode'"):
        check_files(DataConfig(custom_cls=CustomClass(path=path, name="Mode")))

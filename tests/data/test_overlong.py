"""The filter measures the ids that are sent: tools and generation prompt included, the same with any number of threads."""

import asyncio
import logging

import pytest

from streamrl.config.data import DataConfig
from streamrl.config.rollout import ModelConfig, RolloutConfig
from streamrl.config.tools import row_tools
from streamrl.data import PromptStream, RLHFDataset, check_files
from streamrl.errors import DataError
from streamrl.protocol.chat import prompt_ids
from streamrl.protocol.clock import SystemClock
from streamrl.protocol.generate import GenerateResult
from streamrl.rollout import load_tokenizer
from streamrl.rollout.sampling import training_sampling
from streamrl.rollout.single_turn import SingleTurnAgentLoop
from tests.data.worlds import CountingTokenizer, row, schema, write_jsonl, write_tools

TINY = ModelConfig(path="${streamrl}/assets/tiny/model")


def asking(length, **extra):
    return row(prompt=[{"role": "user", "content": "x" * length}], extra_info=extra or None)


@pytest.fixture
def tools(tmp_path):
    return write_tools(tmp_path / "tools.yaml", schema("add", a="integer"), schema("weather", city="string"), schema("time"))


def kept(tmp_path, rows, **data):
    config = DataConfig(**{"filter_overlong_prompts": True, "max_prompt_length": 64, "shuffle": False, **data})
    dataset = RLHFDataset(write_jsonl(tmp_path / "t.jsonl", rows), config, tokenizer=CountingTokenizer())
    return [len(dataset[i]["raw_prompt"][0]["content"]) for i in range(len(dataset))]


def test_tools_count_and_equal_length_is_kept(tmp_path, tools, caplog):
    with caplog.at_level(logging.INFO):
        assert kept(tmp_path, [asking(50), asking(33), asking(34)], tool_config_path=tools) == [33]
    assert "3 rows before, 1 after, 2 too long" in caplog.text
    assert kept(tmp_path, [asking(50), asking(63), asking(64)]) == [50, 63]


def test_a_row_that_selects_fewer_tools_may_be_longer(tmp_path, tools):
    rows = [asking(53, tool_selection=["weather"]), asking(63, tool_selection=[]), asking(54, tool_selection=["add"])]
    assert kept(tmp_path, rows, tool_config_path=tools) == [53, 63]


def test_an_unknown_selected_tool_is_refused_with_file_and_row(tmp_path, tools):
    path = write_jsonl(tmp_path / "t.jsonl", [row(), row(extra_info={"tool_selection": ["add", "fly"]})])
    with pytest.raises(DataError, match=r"t\.jsonl, row 1 \(counting from 0\), line 2: field 'extra_info\.tool_selection' .*add, time, weather.*fly"):
        check_files(DataConfig(train_files=path, tool_config_path=tools))


def test_the_single_turn_loop_sends_exactly_what_the_filter_measured(tmp_path, tools):
    """With a template that prints tools: the length the filter saw is the length the engine receives."""
    tokenizer = load_tokenizer(TINY)
    template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    sent = []

    async def generate(request):
        sent.append(request.prompt_ids)
        return GenerateResult([5], [-0.1], [0], "eos")

    the_row = {"raw_prompt": [{"role": "user", "content": "2+2="}], "extra_info": {"tool_selection": ["time", "add"]}}
    data = DataConfig(tool_config_path=tools, apply_chat_template_kwargs={"chat_template": template}, max_prompt_length=512)
    parts = {"generate": generate, "tools": None, "interactions": None, "clock": SystemClock(), "request_id": "r"}
    loop = SingleTurnAgentLoop(rollout=RolloutConfig(), data=data, tokenizer=tokenizer, **parts)
    asyncio.run(loop.run(training_sampling(RolloutConfig(), data, 1), **the_row))
    text = tokenizer.decode(sent[0])
    assert '"add"' in text and '"time"' in text and '"weather"' not in text and text.endswith("2+2=A:")
    stored = row(prompt=the_row["raw_prompt"], extra_info=the_row["extra_info"])
    for limit, num_kept in ((len(sent[0]), 1), (len(sent[0]) - 1, 0)):
        files = write_jsonl(tmp_path / "t.jsonl", [stored, row(1, prompt=[{"role": "user", "content": "1"}], extra_info={"tool_selection": []})])
        config = DataConfig(
            train_files=files,
            filter_overlong_prompts=True,
            max_prompt_length=limit,
            tool_config_path=tools,
            apply_chat_template_kwargs={"chat_template": template},
        )
        stream = PromptStream(config, run_seed=1, total_epochs=1, tokenizer=tokenizer)
        assert asyncio.run(stream.num_prompts()) == num_kept + 1


@pytest.mark.parametrize("workers", [1, 3, 50])
def test_any_number_of_workers_keeps_the_same_rows_in_order(tmp_path, workers):
    rows = [asking(1 + 7 * i % 100) for i in range(40)]
    assert kept(tmp_path, rows, filter_overlong_prompts_workers=workers) == kept(tmp_path, rows)


def test_workers_measure_like_one_with_a_real_tokenizer(tmp_path):
    rows = [asking(1 + 3 * i) for i in range(60)]
    path = write_jsonl(tmp_path / "t.jsonl", rows)
    lengths = [len(prompt_ids(load_tokenizer(TINY), r["prompt"], {}, row_tools(DataConfig(), None))) for r in rows]
    for workers in (1, 4):
        config = DataConfig(filter_overlong_prompts=True, max_prompt_length=100, filter_overlong_prompts_workers=workers)
        assert len(RLHFDataset(path, config, tokenizer=load_tokenizer(TINY))) == sum(length <= 100 for length in lengths)


class Fragile(CountingTokenizer):
    def apply_chat_template(self, conversation, **kwargs):
        if conversation[0]["content"] == "x":
            raise ValueError("bad template")
        return super().apply_chat_template(conversation, **kwargs)


def test_rows_that_cannot_be_measured_are_counted_per_file_against_the_configured_share(tmp_path, caplog):
    good, bad = write_jsonl(tmp_path / "a.jsonl", [asking(3)] * 90), write_jsonl(tmp_path / "b.jsonl", [asking(3)] * 9 + [asking(1)])
    config = DataConfig(filter_overlong_prompts=True, max_unmeasurable=0.05)
    with pytest.raises(DataError, match=r"b\.jsonl: at most 0\.05 .*got 1 of 10 .*bad template"):
        RLHFDataset([good, bad], config, tokenizer=Fragile())
    with caplog.at_level(logging.INFO):
        config = DataConfig(filter_overlong_prompts=True, max_unmeasurable=0.1)
        assert len(RLHFDataset([good, bad], config, tokenizer=Fragile())) == 99
    assert "0 too long, 1 could not be measured" in caplog.text


def test_rows_that_need_tools_kwargs_and_have_none_are_counted_once(tmp_path, caplog):
    needy = {"index": 3, "need_tools_kwargs": True}
    rows = [row(0), row(1, extra_info=needy), row(2, extra_info={**needy, "index": 4}), row(3, extra_info={**needy, "tools_kwargs": {"add": {}}})]
    path = write_jsonl(tmp_path / "t.jsonl", rows)
    RLHFDataset(path, DataConfig())
    assert [record.getMessage() for record in caplog.records] == ["2 of 4 rows need tools_kwargs and have none, the first with index 3"]
    caplog.clear()
    RLHFDataset(path, DataConfig(need_tools_kwargs=True))
    assert "3 of 4 rows" in caplog.text

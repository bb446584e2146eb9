"""The same dialogue, once by the native loop and once by an agent with the public client, is the same row, token for token."""

import asyncio
import json
import random

import pytest

from streamrl.config.data import DataConfig
from streamrl.protocol.clock import SystemClock
from streamrl.protocol.generate import GenerateResult, SamplingParams
from streamrl.rollout.interactions import BaseInteraction, Interactions
from streamrl.rollout.tool_agent import ToolAgentLoop
from streamrl.rollout.tools import load_toolbox
from tests.rollout import tool_world
from tests.rollout.endpoint.world import black_box, row, run, schemas, tokens
from tests.rollout.families import FAMILIES, spell, tokenizer_of
from tests.rollout.test_turns import answer_text
from tests.rollout.tool_world import Writes, call, loop_of

END = "<|im_end|>"
PARALLEL = call("add", '{"a": 1, "b": 2}') + call("add", '{"b": 30, "a": 4}')
DIALOGUES = {
    "no call": ["15" + END],
    "one call": [call() + END, "3" + END],
    "text before a call": ["so: " + call() + END, "3" + END],
    "two calls in one answer": [PARALLEL + END, "34" + END],
    "three turns": [call() + END, call("add", '{"a":3,"b":4}') + END, "7" + END],
}


def both(texts, *, as_objects=False, **limits):
    """(native row, black-box row, the requests of each) of one dialogue."""
    first, second = Writes(*texts, version=4), Writes(*texts, version=4)
    expected = tool_world.run(loop_of(first, max_parallel_calls=4, **limits))
    rollout = {"max_tokens_per_call": limits.pop("max_tokens_per_call", None)}
    got = run(black_box(second, rollout=rollout, **limits), row(schemas=schemas(), as_objects=as_objects))
    return expected, got, first.requests, second.requests


@pytest.mark.parametrize("as_objects", [False, True])
@pytest.mark.parametrize("name", DIALOGUES)
def test_a_dialogue_with_tools(name, as_objects):
    expected, got, asked, asked_too = both(DIALOGUES[name], as_objects=as_objects)
    assert [tokens(output) for output in got] == [tokens(expected)]
    assert asked_too == asked  # prompts, seeds, budgets, request ids


def test_answers_in_pieces():
    expected, got, asked, asked_too = both(DIALOGUES["three turns"], max_tokens_per_call=5)
    assert [tokens(output) for output in got] == [tokens(expected)] and asked_too == asked
    assert len(asked) > 3


@pytest.mark.parametrize("response_length", range(1, 60))
def test_every_budget(response_length):
    """Where the native loop ends for want of room, the agent is told so and gives up."""
    expected, got, *_ = both(DIALOGUES["one call"], response_length=response_length)
    assert [tokens(output) for output in got] == [tokens(expected)]


@pytest.mark.parametrize("limit", ["max_assistant_turns", "max_user_turns"])
def test_turn_limits(limit):
    expected, got, *_ = both(DIALOGUES["three turns"], **{limit: 1})
    assert [tokens(output) for output in got] == [tokens(expected)]
    assert got[0].stop_reason == limit


class Says(BaseInteraction):
    """The row's turns, one after the other."""

    def __init__(self, turns):
        super().__init__({"name": "says"})
        self.turns = list(turns)

    async def generate_response(self, instance_id, messages, **kwargs):
        return (False, self.turns.pop(0), 0.0, {}) if self.turns else (True, "", 0.0, {})


class Spelled:
    """A model that writes the given texts, cut into other tokens than the tokenizer would."""

    def __init__(self, name, texts, seed):
        self.answers, pick = [], random.Random(seed)
        for text in texts:
            self.answers.append(spell(FAMILIES[name], text, [pick.randrange(200) for _ in range(4)]))
        self.requests = []

    async def __call__(self, request):
        self.requests.append(request)
        ids = self.answers.pop(0)
        return GenerateResult(ids, [-0.5 - i / 64 for i in range(len(ids))], [len(self.answers)] * len(ids), "eos")


def native(generate, box, name, interactions=None):
    """The native loop with everything that the black box has."""
    return ToolAgentLoop(
        rollout=box.rollout, data=box.data, tokenizer=tokenizer_of(name), generate=generate, clock=SystemClock(), request_id="r1",
        tools=load_toolbox(DataConfig(function_tool_path=tool_world.TOOLS), box.rollout) if interactions is None else box.tools,
        interactions=Interactions(interactions),
    )  # fmt: skip


FORMATS = {
    "qwen2_5": "hermes", "qwen3": "hermes", "llama3": "llama3_json", "mistral": "mistral", "glm4": "glm", "deepseek_v3": "deepseek", "harmony": "gpt-oss"
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_tools_in_every_format_with_answers_that_are_not_canonical(name):
    family = FAMILIES[name]
    values: dict = {"a": 1, "b": 2}
    function = {"name": "add", "arguments": json.dumps(values) if family.text_arguments else values}
    told = [
        {"role": "user", "content": "the question"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call00100", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call00100", "name": "add", "content": "3"},
        {"role": "assistant", "content": "the answer is 3"},
        {"role": "user", "content": "thanks"},
    ]
    texts = ["".join(answer_text(family, told, place, schemas())) for place in (1, 3)]
    first, second = Spelled(name, texts, 5), Spelled(name, texts, 5)
    box = black_box(second, the_tokenizer=tokenizer_of(name), response_length=4000, prompt_length=4000, format=FORMATS[name])
    the_row = row(prompt="the question", schemas=schemas())
    expected = asyncio.run(native(first, box, name).run(SamplingParams(max_tokens=4000, seed=7), **the_row))
    (got,) = run(box, the_row)
    assert expected.num_turns == 4 and tokens(got) == tokens(expected) and second.requests == first.requests


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_begins_with_calls_in_its_history_in_every_family(name):
    """What an agent that resets its context sends; the prompt is the template's, whether it wants arguments as objects or as text."""
    made = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    history = [
        {"role": "user", "content": "the question"},
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "call00000", "content": "3"},
    ]
    family = FAMILIES[name]
    texts = [f"{i}{(family.ends or (family.eos,))[0]}" for i in range(2)]
    box = black_box(Spelled(name, texts, 5), "says", the_tokenizer=tokenizer_of(name), response_length=4000, prompt_length=4000, format=FORMATS[name])
    (got,) = run(box, row(turns=["more"], options={"tools": schemas()}) | {"raw_prompt": history})
    shown = tokenizer_of(name).decode(got.prompt_ids).split("the question")[1]
    assert got.num_turns == 4 and "add" in shown and "\\" not in shown  # text where an object belongs would be quoted twice


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_template_family_with_answers_that_are_not_canonical(name):
    family = FAMILIES[name]
    end = (family.ends or (family.eos,))[0]
    texts, turns = ["the answer is 42" + end, "  so\n the tool" + end, "1" + end], ["more?", "and the rest"]
    the_row = row(prompt="the question", turns=turns)
    first, second = Spelled(name, texts, 3), Spelled(name, texts, 3)
    box = black_box(second, "says", the_tokenizer=tokenizer_of(name), response_length=2000, prompt_length=2000)
    loop = native(first, box, name, {"says": Says(turns)})
    expected = asyncio.run(loop.run(SamplingParams(max_tokens=2000, seed=7), **the_row))
    expected.stop_reason = "eos"  # the interaction ended the one, nothing the other
    (got,) = run(box, the_row)
    assert tokens(got) == tokens(expected) and second.requests == first.requests

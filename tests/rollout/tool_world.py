"""A tool agent in one process: the tiny tools' tokenizer and template, a scripted model that writes text, tools and interactions that obey the row."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

from streamrl.config.data import DataConfig
from streamrl.config.multi_turn import MultiTurnConfig
from streamrl.config.rollout import ModelConfig, RolloutConfig, Timeouts
from streamrl.protocol.clock import SystemClock
from streamrl.protocol.generate import GenerateResult, SamplingParams
from streamrl.rollout import load_tokenizer
from streamrl.rollout.interactions import Interactions
from streamrl.rollout.tool_agent import ToolAgentLoop
from streamrl.rollout.tools import load_toolbox

MODEL = Path(__file__).parents[2] / "streamrl/assets/tiny_tools/model"
TOOLS = str(Path(__file__).with_name("tool_functions.py"))


@functools.cache
def tokenizer():
    return load_tokenizer(ModelConfig(path=str(MODEL)))


def ids_of(text):
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def call(name="add", arguments='{"a": 1, "b": 2}'):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


class Writes:
    """A model that writes the given texts, one per call, in tokens; ``<|im_end|>`` makes it stop by itself, otherwise by ``max_tokens``."""

    def __init__(self, *texts, version=0):
        self.texts = list(texts)
        self.requests = []
        self.version = version

    async def __call__(self, request):
        self.requests.append(request)
        text = self.texts.pop(0)
        if callable(text):
            text = await text(request)
        ids = ids_of(text)
        cut = ids[: request.sampling.max_tokens]
        if len(cut) < len(ids):
            self.texts.insert(0, tokenizer().decode(ids[len(cut) :]))
        stopped = bool(cut) and cut[-1] == tokenizer().eos_token_id
        reason = "eos" if stopped else "length"
        return GenerateResult(cut, [-0.25] * len(cut), [self.version] * len(cut), reason)


def loop_of(generate, *, response_length=120, prompt_length=120, interactions=None, clock=None, timeouts=None, max_tokens_per_call=None, tools=TOOLS, **multi):
    data = DataConfig(max_prompt_length=prompt_length, max_response_length=response_length, function_tool_path=tools)
    rollout = RolloutConfig(
        multi_turn=MultiTurnConfig(function_tool_path=tools, **multi), timeouts=timeouts or Timeouts(), max_tokens_per_call=max_tokens_per_call
    )
    return ToolAgentLoop(
        rollout=rollout,
        data=data,
        tokenizer=tokenizer(),
        generate=generate,
        tools=load_toolbox(data, rollout),
        interactions=Interactions(interactions),
        clock=clock or SystemClock(),
        request_id="r1",
    )


def row(**extra_info):
    return {"raw_prompt": [{"role": "user", "content": "12+3="}], "extra_info": extra_info}


def run(loop, the_row=None, max_tokens=None, seed=7):
    return asyncio.run(loop.run(SamplingParams(max_tokens=max_tokens or loop.data.max_response_length, seed=seed), **(the_row or row())))


def observed(output):
    """The observation texts, in order."""
    texts, current = [], []
    for token, mask in [*zip(output.response_ids, output.response_mask, strict=True), (None, 1)]:
        if mask and current:
            texts.append(tokenizer().decode(current))
            current = []
        elif not mask:
            current.append(token)
    return texts

"""A black-box session in one process: real HTTP on loopback, a scripted model, agents of ``agents.py``."""

import asyncio
from typing import Any

from streamrl.config.data import DataConfig
from streamrl.config.multi_turn import MultiTurnConfig
from streamrl.config.rollout import RolloutConfig
from streamrl.protocol.clock import SystemClock
from streamrl.protocol.generate import SamplingParams
from streamrl.rollout.endpoint import BlackBoxAgentLoop
from streamrl.rollout.interactions import Interactions
from streamrl.rollout.tools import ToolBox, load_toolbox
from tests.rollout.tool_world import TOOLS, loop_of, tokenizer


def black_box(generate, agent="solve", *, the_tokenizer=None, command=None, response_length=120, prompt_length=120, rollout=None, **multi):
    data = DataConfig(max_prompt_length=prompt_length, max_response_length=response_length)
    config = RolloutConfig(multi_turn=MultiTurnConfig(**multi), **(rollout or {}))
    return BlackBoxAgentLoop(
        rollout=config,
        data=data,
        tokenizer=the_tokenizer or tokenizer(),
        generate=generate,
        tools=load_toolbox(data, config),
        interactions=Interactions(),
        clock=SystemClock(),
        request_id="r1",
        agent=None if command else f"tests.rollout.endpoint.agents:{agent}",
        command=command,
    )


def schemas():
    """Of the tools that the native loop of ``tool_world`` has."""
    toolbox: ToolBox = loop_of(None).tools
    return toolbox.schemas({})


def row(*, prompt="12+3=", **columns) -> dict[str, Any]:
    return {"raw_prompt": [{"role": "user", "content": prompt}], "schemas": None, **columns}


def run(loop, the_row=None, *, seed=7, max_tokens=None, **sampling):
    asked = SamplingParams(max_tokens=max_tokens or loop.data.max_response_length, seed=seed, **sampling)
    return asyncio.run(loop.run(asked, **(the_row or row())))


def tokens(output):
    """Everything that is trained on."""
    return {
        name: getattr(output, name)
        for name in ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "rollout_versions", "stop_reason", "num_turns")
    }


__all__ = ["TOOLS", "black_box", "row", "run", "schemas", "tokens"]

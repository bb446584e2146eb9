"""A calculator agent written with the public OpenAI client alone: what it does is trained, though it knows nothing of streamrl.

    pip install openai
    cat > loops.yaml <<'END'
    - name: calculator_agent
      class_path: streamrl.rollout.endpoint.BlackBoxAgentLoop
      kwargs: {agent: "examples/black_box_agent.py:solve"}
    END
    streamrl launch configs/tiny_tools_cpu.yaml rollout.agent.agent_loop_config_path=loops.yaml ...

Rows with ``agent_name: calculator_agent`` (or all that name none, with ``rollout.agent.default_agent_loop=calculator_agent``) run in it. It returns no
reward, so the run scores its last words. The same file works against any other OpenAI-compatible address.
"""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

from streamrl.rollout.tools.calculator import calculator  # stands for the agent's own tool

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Value of an arithmetic expression",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "for example 12*34"}},
            "required": ["expression"],
        },
    },
}
MAX_TURNS = 3


async def solve(base_url: str, api_key: str, row: dict[str, Any]) -> None:
    """Ask, calculate, ask again, until an answer comes without a call."""
    messages: list[Any] = list(row["raw_prompt"])
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(MAX_TURNS):
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": calculate(call.function.arguments)})


def calculate(arguments: str) -> str:
    try:
        return str(calculator(**json.loads(arguments)))
    except Exception as error:  # the model wrote the arguments
        return f"error: {error}"

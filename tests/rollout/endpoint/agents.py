"""Agents written with the public client, as users write them. They know nothing of streamrl."""

import asyncio
import json

from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAI

SEEN = []  # what the last agent saw: answers and errors


def client_of(base_url, api_key, **options):
    """The certificates of a client that never leaves loopback take longer to load than a session."""
    return AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=DefaultAsyncHttpxClient(verify=False), **options)


async def solve(base_url, api_key, row):
    """The plain tool loop: call, run tools, call again, until an answer has no calls. The row may say what to do otherwise."""
    SEEN.clear()
    schemas = row["schemas"]
    messages = list(row["raw_prompt"])
    async with client_of(base_url, api_key) as client:
        while True:
            options = {"tools": schemas} if schemas else {}
            answer = await client.chat.completions.create(model="any", messages=messages, **options, **row.get("options", {}))
            message = answer.choices[0].message
            SEEN.append(answer)
            messages.append(message if row.get("as_objects") else message.model_dump())
            if not message.tool_calls:
                return row.get("reward")
            for call in message.tool_calls:
                result = await run_tool(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def run_tool(name, arguments):
    if name == "add":
        return str(arguments["a"] + arguments["b"])
    return "0123456789" * (arguments["size"] // 10)


async def says(base_url, api_key, row):
    """Sends the row's ``turns`` one after the other as user messages."""
    SEEN.clear()
    messages = list(row["raw_prompt"])
    async with client_of(base_url, api_key, max_retries=0) as client:
        for turn in [*row["turns"], None]:
            answer = await client.chat.completions.create(model="any", messages=messages, **row.get("options", {}))
            SEEN.append(answer)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            if turn is not None:
                messages.append({"role": "user", "content": turn})


def plain(base_url, api_key, row):
    """A plain function with the blocking client."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    answer = client.chat.completions.create(model="any", messages=row["raw_prompt"])
    return {"reward": 0.5, "turn_scores": [0.25], "tool_rewards": [1]} if answer.choices[0].message.content else None


def raises(base_url, api_key, row):
    raise ZeroDivisionError("in the agent")


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")


async def raises_what_the_row_says(base_url, api_key, row):
    raise {"SystemExit": SystemExit(1), "KeyboardInterrupt": KeyboardInterrupt(), "CancelledError": asyncio.CancelledError(), "Mute": Mute()}[row["error"]]


def nothing(base_url, api_key, row):
    return 1.0


def nonsense(base_url, api_key, row):
    return {"score": 1.0}


async def scripted(base_url, api_key, row):
    """What the row's ``do`` does with a client."""
    async with client_of(base_url, api_key, max_retries=0) as client:
        return await row["do"](client)

"""The HTTP side: keys, refusals in OpenAI's shape, streams, retries, many sessions at once."""

import asyncio
import json

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from streamrl.protocol.generate import SamplingParams
from streamrl.rollout.endpoint.server import MAX_REQUEST_BYTES, endpoint
from streamrl.rollout.endpoint.session import MAX_CALLS, MAX_ROWS, EndpointSession
from tests.rollout.endpoint.agents import client_of
from tests.rollout.endpoint.world import black_box, row, schemas
from tests.rollout.tool_world import Writes, call, ids_of, tokenizer

END = "<|im_end|>"
BODY = {"model": "any", "messages": [{"role": "user", "content": "12+3="}]}


def session_of(generate, *, temperature=1.0, **limits):
    loop = black_box(generate, **limits)
    sampling = SamplingParams(max_tokens=limits.get("response_length", 120), temperature=temperature)
    return EndpointSession(loop._parts(sampling), loop._training(sampling))


def serve(scenario, *texts, **options):
    """The result of ``scenario(access, session)`` against a running session whose model says ``texts``."""

    async def main():
        generate = texts[0] if texts and callable(texts[0]) else Writes(*(text + END for text in texts))
        session = session_of(generate, **options)
        async with endpoint().open(session) as access:
            return await scenario(access, session)

    return asyncio.run(main())


async def post(access, body, *, key=None, path="/chat/completions", headers=None, method="POST"):
    """(status, body) as they are on the wire."""
    sent = {"Authorization": f"Bearer {key or access.api_key}", **(headers or {})}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with aiohttp.ClientSession() as http, http.request(method, access.base_url + path, data=data, headers=sent) as response:
        return response.status, json.loads(await response.read())


def test_the_address_is_loopback_and_keys_differ():
    async def scenario():
        async with endpoint().open(session_of(Writes())) as one, endpoint().open(session_of(Writes())) as two:
            return one, two

    one, two = asyncio.run(scenario())
    assert one.base_url == two.base_url and one.base_url.startswith("http://127.0.0.1:") and one.api_key != two.api_key


@pytest.mark.parametrize("authorization", [None, "Bearer sk-other", "Basic x", "Bearer", ""])
def test_a_call_without_the_key_of_a_session_gets_401(authorization):
    async def scenario(access, session):
        headers = {} if authorization is None else {"Authorization": authorization}
        found = []
        async with aiohttp.ClientSession() as http:
            for method, path in (("POST", "/chat/completions"), ("GET", "/models")):
                async with http.request(method, access.base_url + path, headers=headers, data=b"{}") as response:
                    found.append((response.status, (await response.json())["error"]["code"]))
        return found

    assert serve(scenario) == [(401, "invalid_api_key")] * 2


def test_a_key_is_worth_nothing_when_its_session_has_ended():
    async def scenario():
        async with endpoint().open(session_of(Writes())):
            async with endpoint().open(session_of(Writes("1" + END))) as ended:
                assert (await post(ended, BODY))[0] == 200
            return await post(ended, BODY)

    status, body = asyncio.run(scenario())
    assert status == 401 and body["error"]["type"] == "authentication_error"


def test_the_server_closes_with_its_last_session_and_starts_again():
    async def scenario():
        for _ in range(2):
            async with endpoint().open(session_of(Writes("1" + END))) as access:
                assert (await post(access, BODY))[0] == 200
            with pytest.raises(aiohttp.ClientConnectorError):
                await post(access, BODY)

    asyncio.run(scenario())


def test_a_call_under_way_when_the_session_ends_gets_410():
    async def scenario():
        called = asyncio.Event()

        async def generate(request):
            called.set()
            await asyncio.Event().wait()

        async with endpoint().open(session_of(Writes())):
            async with endpoint().open(session_of(generate)) as access:
                running = asyncio.create_task(post(access, BODY))
                await called.wait()
            return await running

    status, body = asyncio.run(scenario())
    assert status == 410 and body["error"]["code"] == "session_ended"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"seed": 1}, "seed"),
        ({"stop": ["x"]}, "stop"),
        ({"n": 2}, "n"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logprobs": True}, "logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"surprise": 1}, "surprise"),
        ({"temperature": [1]}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"tools": {"type": "function", "function": 1}}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages"),
    ],
)
def test_what_the_endpoint_does_not_take_is_refused_by_name(change, param):
    async def scenario(access, session):
        return await post(access, BODY | change)

    status, body = serve(scenario)
    assert status == 400 and body["error"]["param"] == param and body["error"]["type"] == "invalid_request_error"


def test_fields_that_say_what_the_run_does_anyway_are_taken():
    options = {
        "temperature": 0.5, "top_p": 1, "n": 1, "stop": None, "stream": False, "user": "u", "tool_choice": "auto", "presence_penalty": 0.0,
        "seed": None, "parallel_tool_calls": True, "response_format": {"type": "text"},
    }  # fmt: skip

    async def scenario(access, session):
        return [(await post(access, BODY | options | {"temperature": temperature}))[0] for temperature in (0.5, 0.0, 0.7)]

    rollout = {"temperature": 0.5}
    assert serve(scenario, "1", "2", temperature=0.0, rollout=rollout) == [200, 200, 400]  # the run's, and the session's own in validation


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 400), (b"[]", 400), (b"\xff\xfe", 400), (b"[" * 100_000, 400), (b" " * (MAX_REQUEST_BYTES + 1), 413)],
)
def test_a_body_that_is_no_request(body, status):
    async def scenario(access, session):
        return await post(access, body)

    got, answer = serve(scenario)
    assert got == status and set(answer["error"]) == {"message", "type", "param", "code"}


def test_other_paths_and_methods_are_answered_in_the_same_shape():
    async def scenario(access, session):
        return [await post(access, BODY, path="/embeddings"), await post(access, BODY, method="GET")]

    assert [(status, "message" in body["error"]) for status, body in serve(scenario)] == [(404, True), (405, True)]


def test_models_lists_the_policy():
    async def scenario(access, session):
        async with client_of(access.base_url, access.api_key) as client:
            return [model.id async for model in client.models.list()]

    assert serve(scenario) == ["policy"]


def test_a_stream_carries_everything_in_one_chunk():
    async def scenario(access, session):
        async with client_of(access.base_url, access.api_key) as client:
            stream = await client.chat.completions.create(**BODY, tools=schemas(), stream=True, stream_options={"include_usage": True})
            first, usage = [chunk async for chunk in stream]
            return first.choices[0], usage.usage

    choice, usage = serve(scenario, "so" + call())
    assert choice.delta.content == "so" and choice.finish_reason == "tool_calls"
    assert choice.delta.tool_calls[0].function.name == "add" and choice.delta.tool_calls[0].index == 0
    assert usage.completion_tokens == len(ids_of("so" + call() + END))


def test_a_client_that_tries_again_gets_the_answer_it_missed():
    """Also while the model still writes; a second answer would be a turn that the agent never saw."""

    async def scenario():
        gate = asyncio.Event()

        async def generate(request):
            await gate.wait()
            return await model(request)

        model = Writes("1" + END, "2" + END)
        session = session_of(generate)
        async with endpoint().open(session) as access:
            retry = {"x-stainless-retry-count": "1"}
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(post(access, BODY), 0.1)
            second = asyncio.create_task(post(access, BODY, headers=retry))
            await asyncio.sleep(0.05)
            gate.set()
            answers = [await second, await post(access, BODY, headers=retry), await post(access, BODY)]
        return [body["choices"][0]["message"]["content"] for _, body in answers], len(session.outputs())

    assert asyncio.run(scenario()) == (["1", "1", "2"], 2)


def test_calls_at_a_time_are_bounded_and_the_client_waits_its_turn():
    async def scenario():
        gate = asyncio.Event()

        async def generate(request):
            await gate.wait()
            return await model(request)

        model = Writes(*["1" + END] * (MAX_CALLS + 1))
        async with endpoint().open(session_of(generate)) as access:
            many = [asyncio.create_task(post(access, BODY)) for _ in range(MAX_CALLS)]
            await asyncio.sleep(0.2)
            refused = await post(access, BODY)
            async with client_of(access.base_url, access.api_key) as client:
                patient = asyncio.create_task(client.chat.completions.create(**BODY))
                await asyncio.sleep(0.05)
                gate.set()
                return refused, [status for status, _ in await asyncio.gather(*many)], await patient

    (status, body), others, patient = asyncio.run(scenario())
    assert status == 429 and body["error"]["type"] == "rate_limit_error"
    assert others == [200] * MAX_CALLS and patient.choices[0].message.content == "1"


def test_rows_are_bounded():
    async def scenario(access, session):
        return [(await post(access, BODY))[0] for _ in range(MAX_ROWS + 1)]

    assert serve(scenario, *["1"] * MAX_ROWS) == [200] * MAX_ROWS + [400]


def test_a_failed_engine_is_not_tried_again():
    calls = []

    async def generate(request):
        calls.append(request)
        raise RuntimeError("gone")

    async def scenario(access, session):
        async with client_of(access.base_url, access.api_key) as client:
            with pytest.raises(openai.InternalServerError) as error:
                await client.chat.completions.create(**BODY)
        return error.value.code, session.failure.exception()

    code, failure = serve(scenario, generate)
    assert code == "session_failed" and str(failure) == "gone" and len(calls) == 1


def test_fifty_sessions_share_a_server_and_nothing_else():
    async def one(i):
        async def generate(request):
            await asyncio.sleep(0.001 * (i % 7))
            return await model(request)

        async def do(client: AsyncOpenAI):
            messages = [{"role": "user", "content": f"{i}+1="}]
            for turn in ("more", "again"):
                answer = await client.chat.completions.create(model="any", messages=messages)
                messages += [answer.choices[0].message, {"role": "user", "content": turn}]
            return float(i)

        model = Writes(f"{i}{END}", f"{i}{i}{END}")
        return await black_box(generate, "scripted").run(SamplingParams(max_tokens=120, seed=i), **row(do=do))

    async def scenario():
        return await asyncio.gather(*map(one, range(50)))

    for i, outputs in enumerate(asyncio.run(scenario())):
        (output,) = outputs
        text = tokenizer().decode(output.response_ids)
        assert text.startswith(f"{i}{END}") and text.endswith(f"{i}{i}{END}") and output.reward_score == i

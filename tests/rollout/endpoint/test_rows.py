"""Which requests continue a row and which begin one, and what becomes of the rows when an agent ends."""

import asyncio
import math
import sys

import openai
import pytest

from streamrl.errors import ConfigError, EngineError, SessionFailed
from streamrl.protocol.generate import SamplingParams
from tests.rollout.endpoint import agents
from tests.rollout.endpoint.world import black_box, row, run, schemas
from tests.rollout.tool_world import Writes, call, ids_of, tokenizer

END = "<|im_end|>"
USER = {"role": "user", "content": "12+3="}


async def ask(client, messages, **options):
    """The new message, with the answer behind it."""
    answer = await client.chat.completions.create(model="any", messages=messages, **options)
    return {"role": "assistant", "content": answer.choices[0].message.content}


def user(text):
    return {"role": "user", "content": text}


def scripted(do, *texts, **limits):
    """(outputs, loop) of an agent that does ``do`` with a client and a model that says ``texts``."""
    loop = black_box(Writes(*(text + END for text in texts)), "scripted", **limits)
    return run(loop, row(do=do)), loop


def text_of(output):
    return tokenizer().decode(output.response_ids)


def test_a_growing_conversation_is_one_row():
    async def do(client):
        first = await ask(client, [USER])
        await ask(client, [USER, first, user("more")])

    (output,), loop = scripted(do, "15", "16")
    assert text_of(output).startswith("15" + END) and text_of(output).endswith("16" + END)
    assert output.num_turns == 4 and loop.metrics.context_resets == 0


@pytest.mark.parametrize(
    "second",
    [
        lambda first: [user("summary: 15"), user("more")],  # a summary
        lambda first: [{**first, "content": "14"}, user("more")],  # the answer changed
        lambda first: [user("12+4="), first, user("more")],  # the prompt changed
        lambda first: [USER],  # the same once more: another sample
        lambda first: [USER, first, user("more"), {"role": "assistant", "content": "I"}, user("and")],  # words put into the model's mouth
        lambda first: [USER, first],  # nothing new
    ],
)
def test_a_changed_history_begins_a_row(second):
    async def do(client):
        first = await ask(client, [USER])
        await ask(client, second(first))

    outputs, loop = scripted(do, "15", "16")
    assert [text_of(output) for output in outputs] == ["15" + END, "16" + END]
    assert loop.metrics.context_resets == 1
    seeds = [request.sampling.seed for request in loop.generate.requests]
    assert len(set(seeds)) == 2


def test_other_tools_begin_a_row():
    async def do(client):
        first = await ask(client, [USER])
        await ask(client, [USER, first, user("more")], tools=schemas())

    outputs, _ = scripted(do, "15", "16")
    assert len(outputs) == 2


@pytest.mark.parametrize(
    "spelled",
    [
        lambda first: {"role": "assistant", "content": [{"type": "text", "text": "15"}]},
        lambda first: {**first, "tool_calls": None, "refusal": None, "audio": None},
        lambda first: {**first, "tool_calls": []},
    ],
)
def test_another_spelling_of_the_same_message_continues_the_row(spelled):
    async def do(client):
        first = await ask(client, [USER])
        await ask(client, [USER, spelled(first), user("more")])

    outputs, _ = scripted(do, "15", "16")
    assert len(outputs) == 1


def test_arguments_of_a_call_are_compared_by_value():
    async def do(client):
        answer = await client.chat.completions.create(model="any", messages=[USER], tools=schemas())
        made = answer.choices[0].message.tool_calls[0]
        function = {"name": "add", "arguments": '{"b":2,"a":1}'}
        said = {"role": "assistant", "content": None, "tool_calls": [{"id": made.id, "type": "function", "function": function}]}
        await ask(client, [USER, said, {"role": "tool", "tool_call_id": made.id, "content": "3"}], tools=schemas())

    outputs, _ = scripted(do, call(), "3")
    assert len(outputs) == 1


def test_a_row_can_begin_with_calls_in_its_history():
    """The new row's prompt shows them as the template does; the row then grows like any other."""

    async def do(client):
        made = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
        history = [USER, {"role": "assistant", "content": "", "tool_calls": [made]}, {"role": "tool", "tool_call_id": "x", "content": "3"}]
        first = await ask(client, history, tools=schemas())
        await ask(client, [*history, first, user("more")], tools=schemas())

    (output,), _ = scripted(do, "3", "4")
    assert output.num_turns == 4


def test_an_agent_with_a_sub_agent_has_two_rows_and_its_own_last_words_come_last():
    async def do(client):
        main = [USER]
        main += [await ask(client, main), user("ask somebody")]
        sub = [user("you are the other")]
        sub += [await ask(client, sub), user("sure?")]
        sub += [await ask(client, sub)]
        await ask(client, main)
        return 1.0

    outputs, loop = scripted(do, "15", "7", "8", "16")
    assert [text_of(output).rpartition("assistant\n")[2] for output in outputs] == ["8" + END, "16" + END]
    assert [output.reward_score for output in outputs] == [1.0, 1.0] and loop.metrics.context_resets == 1
    assert {request.request_id for request in loop.generate.requests} == {"r1"}


def test_sub_agents_may_call_at_the_same_time():
    async def do(client):
        await asyncio.gather(*(ask(client, [user(str(i))]) for i in range(8)))

    outputs, _ = scripted(do, *"12345678")
    assert len(outputs) == 8


def test_an_answer_of_bad_calls_is_shown_as_text():
    bad = '<tool_call>{"name": }</tool_call>'
    loop = black_box(Writes(bad + END))
    run(loop, row(schemas=schemas()))
    choice = agents.SEEN[0].choices[0]
    assert choice.message.content == bad and choice.message.tool_calls is None and choice.finish_reason == "stop"
    assert loop.metrics.parse_errors == 1


def test_the_answer_says_what_was_used_and_why_it_ended():
    run(black_box(Writes(call() + END, "3" + END)), row(schemas=schemas()))
    first, second = agents.SEEN
    assert (first.choices[0].finish_reason, second.choices[0].finish_reason) == ("tool_calls", "stop")
    assert first.usage.completion_tokens == len(ids_of(call() + END))
    assert second.usage.total_tokens == second.usage.prompt_tokens + second.usage.completion_tokens
    assert second.usage.prompt_tokens > first.usage.total_tokens


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_agent_s_own_limit_cuts_an_answer_and_the_row_goes_on(name):
    async def do(client):
        answer = await client.chat.completions.create(model="any", messages=[USER], **{name: 2})
        assert answer.choices[0].finish_reason == "length"
        await ask(client, [USER, {"role": "assistant", "content": answer.choices[0].message.content}, user("more")])

    loop = black_box(Writes("1234", "5" + END), "scripted")
    (output,) = run(loop, row(do=do))
    assert tokenizer().decode(output.response_ids[:2]) == "12" and output.response_mask[:3] == [1, 1, 0]


def test_calls_of_an_answer_that_was_cut_are_shown_as_text():
    """They end before the cut, but more might have followed."""

    async def do(client):
        answer = await client.chat.completions.create(model="any", messages=[USER], tools=schemas(), max_tokens=len(ids_of(call())))
        choice = answer.choices[0]
        assert choice.finish_reason == "length" and choice.message.tool_calls is None and choice.message.content == call()

    scripted(do, call())


def test_an_agent_may_make_its_messages_shorter_when_they_do_not_fit():
    async def do(client):
        first = await ask(client, [USER])
        with pytest.raises(openai.BadRequestError) as error:
            await ask(client, [USER, first, user("9" * 200)])
        assert error.value.code == "context_length_exceeded"
        await ask(client, [USER, first, user("more")])

    (output,), loop = scripted(do, "15", "16", response_length=60)
    assert output.stop_reason == "eos" and output.num_turns == 4 and loop.metrics.dropped_observation_tokens > 200


def test_an_agent_that_gives_up_at_its_budget_has_ended_and_is_scored_by_the_run():
    async def do(client):
        await ask(client, [USER, await ask(client, [USER]), user("9" * 200)])

    (output,), _ = scripted(do, "15", "16", response_length=60)
    assert output.stop_reason == "tool_budget" and output.reward_score is None


def test_a_prompt_that_is_too_long_is_refused_and_fails_the_session_only_if_nothing_else_comes():
    async def too_long(client):
        await ask(client, [user("9" * 300)])

    async def do(client):
        with pytest.raises(openai.BadRequestError, match="max_prompt_length"):
            await too_long(client)
        await ask(client, [USER])

    assert len(scripted(do, "15")[0]) == 1
    with pytest.raises(SessionFailed) as failure:
        scripted(too_long)
    assert failure.value.reason == "overlong" and not failure.value.retryable


def test_messages_that_the_template_refuses_are_the_agent_s_mistake():
    class Refuses:
        def __getattr__(self, name):
            return getattr(tokenizer(), name)

        def apply_chat_template(self, conversation, **kwargs):
            if conversation[0]["role"] != "user":
                raise KeyError("roles must alternate")
            return tokenizer().apply_chat_template(conversation, **kwargs)

    async def do(client):
        with pytest.raises(openai.BadRequestError, match="roles must alternate"):
            await ask(client, [{"role": "system", "content": "x"}])
        await ask(client, [USER])

    (output,), _ = scripted(do, "15", the_tokenizer=Refuses())
    assert text_of(output) == "15" + END


@pytest.mark.parametrize("agent", ["raises", "nonsense"])
def test_an_agent_that_fails_is_a_failed_session(agent):
    with pytest.raises(SessionFailed) as failure:
        run(black_box(Writes(), agent))
    assert failure.value.reason == "loop_error"


def test_an_agent_that_never_calls_has_no_rows():
    assert run(black_box(Writes(), "nothing")) == []


def test_a_plain_function_runs_in_a_thread_and_its_dict_is_the_reward():
    (output,) = run(black_box(Writes("15" + END), "plain"))
    assert output.reward_score == 0.5 and output.extra_fields == {"turn_scores": [0.25], "tool_rewards": [1.0]}


@pytest.mark.parametrize("reward", [0, 1.0, math.nan, None])
def test_a_number_is_the_reward_as_it_is(reward):
    (output,) = run(black_box(Writes("15" + END)), row(reward=reward))
    assert output.reward_score is reward or output.reward_score == reward or math.isnan(output.reward_score)


def test_an_engine_failure_ends_the_session_whatever_the_agent_does():
    seen = []

    async def broken(request):
        raise SessionFailed("the engine is down", reason="engine_error")

    async def do(client):
        try:
            await ask(client, [USER])
        except openai.InternalServerError as error:
            seen.append(error.code)
            raise
        finally:
            await asyncio.Event().wait()  # an agent that would not end by itself

    with pytest.raises(SessionFailed) as failure:
        run(black_box(broken, "scripted"), row(do=do))
    assert failure.value.reason == "engine_error"


def test_an_unexpected_error_of_the_engine_travels():
    async def broken(request):
        raise EngineError("gone")

    with pytest.raises(EngineError):
        run(black_box(broken))


def test_cancelling_the_session_cancels_its_calls_and_its_agent():
    async def scenario():
        called, ended = asyncio.Event(), []

        async def generate(request):
            called.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("generate")

        async def do(client):
            try:
                await ask(client, [USER])
            finally:
                ended.append("agent")

        running = asyncio.create_task(black_box(generate, "scripted").run(SamplingParams(max_tokens=9), **row(do=do)))
        await called.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.sleep(0.05)
        return ended

    assert sorted(asyncio.run(scenario())) == ["agent", "generate"]


def test_what_a_session_has_at_its_deadline_is_kept_on_request():
    async def scenario():
        async def do(client):
            await ask(client, [USER])
            answered.set()
            await asyncio.Event().wait()

        answered = asyncio.Event()
        loop = black_box(Writes("15" + END), "scripted")
        assert loop.partial() is None
        running = asyncio.create_task(loop.run(SamplingParams(max_tokens=9), **row(do=do)))
        await answered.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return loop.partial()

    output = asyncio.run(scenario())
    assert output.stop_reason == "session_timeout" and text_of(output) == "15" + END


def test_a_declaration_names_an_agent_or_a_command():
    for kwargs in ({"agent": "solve", "command": ["x"]}, {"agent": "nobody"}):
        with pytest.raises(ConfigError, match="agent_loop_config_path"):
            loop = black_box(Writes(), **kwargs)
            type(loop)(**{**vars_of(loop), **kwargs})


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("ls -l", r"is a list of words, each a text, got 'ls -l'"),
        ([], "is a list of words"),
        (["sleep", 5], "is a list of words"),
        ("", "is a list of words"),
        (["no-such-program", "x"], "begins with a program that exists, got 'no-such-program'"),
        ([""], "begins with a program that exists"),
    ],
)
def test_a_command_that_cannot_be_started_is_refused_before_any_session(command, said):
    loop = black_box(Writes(), command=["true"])
    with pytest.raises(ConfigError, match=said):
        type(loop).init_class(rollout=loop.rollout, data=loop.data, tokenizer=loop.tokenizer, tools=loop.tools, command=command)


def vars_of(loop):
    names = ("rollout", "data", "tokenizer", "generate", "tools", "interactions", "clock", "request_id")
    return {name: getattr(loop, name) for name in names}


COMMAND = """
import json, os, sys
from openai import OpenAI
row = json.loads(sys.stdin.readline())
answer = OpenAI().chat.completions.create(model="any", messages=row["raw_prompt"])
print("noise", file=sys.stderr)
print("talk", answer.choices[0].message.content)
print(json.dumps({"reward": 0.25}))
"""


def test_a_command_gets_address_key_and_row_and_prints_its_reward():
    (output,) = run(black_box(Writes("15" + END), command=[sys.executable, "-c", COMMAND]))
    assert text_of(output) == "15" + END and output.reward_score == 0.25


def test_a_command_that_fails_is_a_failed_session_with_the_end_of_what_it_said():
    with pytest.raises(SessionFailed, match=r"got 3 of .*no such thing"):
        run(black_box(Writes(), command=[sys.executable, "-c", "import sys; print('no such thing', file=sys.stderr); sys.exit(3)"]))

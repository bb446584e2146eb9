"""One session's tools: order, arguments, errors as text, life cycle. Limits in time: test_limits.py."""

import asyncio

import pytest

from streamrl.rollout.tools import BaseTool, ToolResponse, tool
from streamrl.rollout.tools.results import MAX_CHARACTERS, MAX_ERROR_CHARACTERS
from tests.rollout.tools.worlds import Recorder, call, results, schema, session


@tool
async def sleepy(name: str, seconds: float) -> str:
    """Sleeps."""
    await asyncio.sleep(seconds)
    return f"r{name}"


def test_parallel_results_come_in_call_order_and_once():
    """B finishes first."""
    calls = [call("sleepy", f'{{"name": "{name}", "seconds": {seconds}}}') for name, seconds in (("a", 0.05), ("b", 0.0), ("c", 0.02))]
    assert [result.text for result in results(session(sleepy), *calls)] == ["ra", "rb", "rc"]


def test_calls_beyond_the_cap_are_skipped_and_told_so():
    recorder = Recorder()
    a_session = session(recorder, max_parallel_calls=1)
    first, *others = results(a_session, *[call("recorder")] * 3)
    assert (first.outcome, [(other.outcome, other.reward) for other in others]) == ("ok", [("skipped", None)] * 2)
    assert "at most 1" in others[0].text
    assert recorder.done.count("execute") == 1
    assert a_session.outcomes == {"ok": 1, "skipped": 2}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"n": ', "malformed JSON"),
        ('{"n":3}{"n":3}', "malformed JSON"),
        ('{"n": "a\nb"}', "malformed JSON"),
        ('{"n": NaN}', "malformed JSON"),
        ("[" * 100_000, "malformed JSON"),
        ("[1]", "one JSON object, got a list"),
        ("null", "one JSON object, got null"),
        ('{"n": "3"}', "wrong arguments"),
        ("{}", "wrong arguments"),
    ],
)
def test_arguments_that_do_not_fit_never_reach_the_tool(arguments, said):
    reached = []

    @tool
    def counted(n: int):
        """Counts."""
        reached.append(n)

    recorder = Recorder(n={"type": "integer"})
    a_session = session(counted, recorder)
    for result in results(a_session, call("counted", arguments), call("recorder", arguments)):
        assert (result.outcome, result.reward) == ("malformed", 0.0)
        assert said in result.text and len(result.text) <= MAX_ERROR_CHARACTERS
    assert not reached and not recorder.log


def test_an_argument_nobody_asked_for_is_refused_by_function_tools():
    (result,) = results(session(sleepy), call("sleepy", '{"name": "a", "seconds": 0, "x": 1}'))
    assert (result.outcome, result.text) == ("malformed", "Error: wrong arguments: Object contains unknown field `x`")


def test_a_parse_error_and_an_unknown_name_are_told_to_the_model():
    a_session = session(sleepy)
    bad, unknown = results(a_session, call("", error="a call has a name, got none"), call("rm -rf"))
    assert (bad.outcome, bad.text) == ("malformed", "Error: a call has a name, got none")
    assert (unknown.outcome, unknown.text) == ("unknown", "Error: there is no tool 'rm -rf'; known: sleepy")
    assert set(a_session.times) == {"unknown"}  # what the model wrote is no label


class Mute(ValueError):
    """Can't say what it is."""

    def __str__(self):
        raise self.args[0] if self.args else RuntimeError("no words")


class Ends(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad\nTraceback (most recent call last)"), "Error: ValueError: bad"),
        (FileNotFoundError(2, "No such file or directory", "/home/ann/secret.txt"), "Error: FileNotFoundError: No such file or directory"),
        (RuntimeError("cannot read /home/ann/x.py: line 3"), "Error: RuntimeError: cannot read <path>: line 3"),
        (KeyError("x"), "Error: KeyError: 'x'"),
        (RuntimeError(), "Error: RuntimeError"),
        (OSError(2, 5), "Error: FileNotFoundError: [Errno 2] 5"),
        (Mute(), "Error: Mute: no message: its __str__ raises"),
        (Mute(SystemExit(1)), "Error: Mute: no message: its __str__ raises"),
        (SystemExit(3), "Error: RuntimeError: user code raised SystemExit"),
        (KeyboardInterrupt(), "Error: RuntimeError: user code raised KeyboardInterrupt"),
        (Ends(), "Error: RuntimeError: user code raised Ends"),
        (asyncio.CancelledError(), "Error: RuntimeError: user code cancelled itself"),
    ],
)
def test_an_exception_is_one_short_line_without_paths(error, text):
    async def fails(parameters):
        raise error

    recorder = Recorder(act=fails)
    (result,) = results(session(recorder), call("recorder"))
    assert (result.outcome, result.text, result.reward) == ("error", text, 0.0)
    assert recorder.done == ["create", "execute", "release"]


def test_a_sync_function_that_exits_ends_only_its_call():
    @tool
    def leaves():
        """Leaves."""
        raise SystemExit(1)

    assert results(session(leaves), call("leaves"))[0].text == "Error: RuntimeError: user code raised SystemExit"


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, Ends, asyncio.CancelledError, Mute])
@pytest.mark.parametrize("method", ["create", "calc_reward", "release"])
def test_a_method_that_raises_anything_is_counted_and_the_event_loop_goes_on(method, error):
    class Raising(Judged):
        pass

    async def raises(self, *args, **kwargs):
        raise error

    setattr(Raising, method, raises)

    async def run():
        a_session = session(Raising())
        (result,) = await a_session.call([call("recorder")])
        rewards = await a_session.close()
        return result.outcome, rewards, a_session.times["recorder"].outcomes

    outcome, rewards, outcomes = asyncio.run(run())
    assert outcome == ("error" if method == "create" else "ok") and rewards == ([] if method == "calc_reward" else [0.5])
    assert (outcomes["reward_failed"], outcomes["release_failed"]) == (method == "calc_reward", method == "release")


def test_a_tool_that_cancels_its_own_task_has_failed():
    async def cancels(parameters):
        asyncio.current_task().cancel()
        await asyncio.sleep(1)

    (result,) = results(session(Recorder(act=cancels)), call("recorder"))
    assert (result.outcome, result.text) == ("error", "Error: RuntimeError: user code cancelled itself")


@pytest.mark.parametrize("outcome", ["ok", "error", "timeout"])
def test_a_tool_may_say_the_outcome_in_its_response(outcome):
    async def tells(parameters):
        return ToolResponse(text="told", outcome=outcome), None, {}

    a_session = session(Recorder(act=tells))
    (result,) = results(a_session, call("recorder"))
    assert (result.text, result.outcome, result.reward) == ("told", outcome, None) and a_session.outcomes == {outcome: 1}
    with pytest.raises(ValueError, match="ok, error, timeout, got 'bad'"):
        ToolResponse(text="told", outcome="bad")


def test_a_megabyte_of_output_is_cut_before_anything_tokenises_it():
    @tool
    def talks():
        """Talks."""
        return "a" + "x" * 2_000_000 + "z"

    (result,) = results(session(talks), call("talks"))
    assert len(result.text) <= MAX_CHARACTERS and result.text[0] + result.text[-1] == "az" and "(truncated)" in result.text


def test_an_instance_is_made_at_the_first_call_with_the_rows_arguments_and_released_once():
    used, idle = Recorder("used"), Recorder("idle")
    a_session = session(used, idle, used={"create_kwargs": {"seed": 7}})
    results(a_session, call("used"), call("used"))
    assert used.done == ["create", "execute", "execute", "release"]
    assert {instance for _, instance, _ in used.log} == {used.log[0][1]} and used.log[0][2] == {"seed": 7}
    assert not idle.log
    assert asyncio.run(a_session.close()) == [] and used.done.count("release") == 1


@pytest.mark.parametrize("fail", ["create", "execute", "release"])
def test_every_create_has_its_release_whatever_failed(fail):
    recorder = Recorder(fail=[fail])
    a_session = session(recorder)
    first, second = results(a_session, call("recorder"), call("recorder"))
    assert first.outcome == second.outcome == ("ok" if fail == "release" else "error")
    assert (recorder.done.count("create"), recorder.done.count("release")) == (1, 1)
    assert a_session.times["recorder"].outcomes["release_failed"] == (fail == "release")


@pytest.mark.parametrize("kwargs", [["list"], {"create_kwargs": [1]}, "text"])
def test_create_arguments_of_a_wrong_form_are_an_error_of_the_tool(kwargs):
    (result,) = results(session(Recorder(), recorder=kwargs), call("recorder"))
    assert result.outcome == "error"


class Judged(Recorder):
    """Its reward is what it was given."""

    value = 0.5

    async def calc_reward(self, instance_id):
        self._note("calc_reward", instance_id, None)
        return self.value


def test_the_reward_of_a_tool_is_asked_once_before_its_release_if_the_class_has_one():
    judged, plain = Judged("judged"), Recorder("plain")

    async def run():
        a_session = session(judged, plain)
        await a_session.call([call("judged"), call("plain"), call("judged")])
        return await a_session.close()

    assert asyncio.run(run()) == [0.5]
    assert judged.done == ["create", "execute", "execute", "calc_reward", "release"]


@pytest.mark.parametrize("value", [float("nan"), "high"])
def test_a_reward_that_is_none_is_counted_and_left_out(value):
    judged = Judged()
    judged.value = value

    async def run():
        a_session = session(judged)
        await a_session.call([call("recorder")])
        return await a_session.close(), a_session.times["recorder"].outcomes["reward_failed"]

    assert asyncio.run(run()) == ([], 1)
    assert judged.done[-1] == "release"


def test_an_image_is_handed_on_and_seconds_are_counted():
    async def draws(parameters):
        await asyncio.sleep(0.01)
        return ToolResponse(text="see", image=["pixels"]), 0.25, {"n": 2}

    a_session = session(Recorder(act=draws))
    (result,) = results(a_session, call("recorder"))
    assert (result.text, result.image, result.reward, result.metrics) == ("see", ["pixels"], 0.25, {"n": 2})
    assert 0.009 < a_session.seconds == sum(a_session.times["recorder"].seconds) < 1


def test_a_class_tool_may_return_text_alone():
    class Plain(BaseTool):
        async def execute(self, instance_id, parameters, *, agent_data):
            return agent_data.request_id

    assert results(session(Plain({}, schema("plain"))), call("plain"))[0].text == "r"

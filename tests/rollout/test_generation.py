"""An engine call is whole, checked and in time, or the session fails."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import EngineError, SessionFailed
from streamrl.protocol.generate import GenerateRequest, GenerateResult, SamplingParams
from streamrl.rollout.generation import MAX_RESUMES, ResumingGenerate
from streamrl.testing import JumpingClock
from tests.rollout.fakes import ScriptedGenerate, part

REQUEST = GenerateRequest("r", [1, 2], SamplingParams(max_tokens=9, seed=5))


def call(generate, *, request=REQUEST, needs_log_probs=True):
    return asyncio.run(ResumingGenerate(generate, timeout_s=10.0, needs_log_probs=needs_log_probs, clock=JumpingClock())(request))


def refusal(generate, **kwargs):
    with pytest.raises(SessionFailed) as error:
        call(generate, **kwargs)
    assert error.value.reason == "engine_error" and error.value.retryable
    return str(error.value)


def test_an_abort_is_continued_with_its_tokens_and_the_budget_left():
    generate = ScriptedGenerate(part("abcde", "abort", version=3, log_prob=-0.3), part("xyz", version=4))
    result = call(generate)
    assert result.token_ids == [*b"abcdexyz", 0] and result.stop_reason == "eos"
    assert result.versions == [3] * 5 + [4] * 4 and result.log_probs == [-0.3] * 5 + [-0.5] * 4
    second = generate.requests[1]
    assert second.request_id == "r" and second.prompt_ids == [1, 2, *b"abcde"] and second.sampling.max_tokens == 4


def test_an_abort_before_the_first_token_leaves_no_trace():
    generate = ScriptedGenerate(part("", "abort", version=3), part("x", version=4))
    assert call(generate).versions == [4, 4] and generate.requests[1] == REQUEST


def test_an_abort_at_the_end_of_the_budget_is_a_length_stop_without_another_call():
    generate = ScriptedGenerate(part("abcdefghi", "abort"))
    assert call(generate).stop_reason == "length" and len(generate.requests) == 1


def test_endless_aborts_end():
    generate = ScriptedGenerate(*[part("", "abort")] * (MAX_RESUMES + 1))
    assert "aborted at most" in refusal(generate)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=4), st.integers(1, 9))
def test_any_interruption_of_a_deterministic_engine_gives_the_undisturbed_answer(cuts, budget):
    async def engine(request):
        """Token t is a function of its position; stops after each cut."""
        start, cut = len(request.prompt_ids), parts.pop(0) if parts else 99
        size = min(cut, request.sampling.max_tokens)
        stop = "length" if size == request.sampling.max_tokens else "abort"
        return GenerateResult([start + i for i in range(size)], [-0.1] * size, [0] * size, stop)

    parts = list(cuts)
    result = call(engine, request=GenerateRequest("r", [1, 2], SamplingParams(max_tokens=budget)))
    assert result.token_ids == list(range(2, 2 + budget)) and result.stop_reason == "length"


@pytest.mark.parametrize("log_probs", [None, [-0.1, None, -10.2], [-0.1, -0.2], [-0.1, float("nan"), -0.2], [-0.1, 0.3, -0.2], [-0.1, float("-inf"), -0.2]])
def test_missing_or_impossible_log_probs_are_refused_and_not_filled(log_probs):
    assert "log-prob" in refusal(ScriptedGenerate(GenerateResult([4, 5, 6], log_probs, [0, 0, 0], "eos")))


def test_zero_and_minus_zero_are_log_probs():
    assert call(ScriptedGenerate(GenerateResult([4, 5], [0.0, -0.0], [0, 0], "eos"))).log_probs == [0.0, 0.0]


def test_a_run_that_records_no_log_probs_does_not_ask_for_them():
    assert call(ScriptedGenerate(GenerateResult([4], [], [0], "eos")), needs_log_probs=False).token_ids == [4]


@pytest.mark.parametrize("result", [GenerateResult([4, 5], [-0.1] * 2, [0], "eos"), GenerateResult([4], [-0.1], [-1], "eos"), part("abcdefghijk", "length")])
def test_tokens_versions_and_budget_must_agree(result):
    refusal(ScriptedGenerate(result))


@pytest.mark.parametrize("error", [EngineError("the engine is gone"), OSError("pipe")])
def test_an_engine_failure_is_an_engine_error(error):
    assert str(error) in refusal(ScriptedGenerate(error))


def test_a_call_past_its_deadline_is_cancelled_in_the_engine():
    generate = ScriptedGenerate("hang")
    assert "within 10 s" in refusal(generate)
    assert generate.cancelled == 1

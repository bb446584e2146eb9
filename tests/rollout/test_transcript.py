"""Budgets, alignment and versions of a session's tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import ProtocolError, SessionFailed
from streamrl.protocol.generate import GenerateResult
from streamrl.rollout.output_checks import OutputRules, check_outputs
from streamrl.rollout.transcript import Transcript


def transcript(response_length=10, prompt=(1, 2), model_len=1000, with_log_probs=True):
    return Transcript(list(prompt), response_length=response_length, model_len=model_len, with_log_probs=with_log_probs)


def wrote(*ids, versions=0, log_prob=-0.5):
    versions = [versions] * len(ids) if isinstance(versions, int) else versions
    return GenerateResult(list(ids), [log_prob] * len(ids), versions, "eos")


def test_only_sampled_ids_are_trainable():
    t = transcript(response_length=100)
    t.add_model(wrote(10, 11, 99))
    t.add_observation([3, 20, 21, 1, 2])
    t.add_model(wrote(12, 99))
    output = t.output("eos", 4)
    assert output.prompt_ids == [1, 2] and output.response_ids == [10, 11, 99, 3, 20, 21, 1, 2, 12, 99]
    assert output.response_mask == [1, 1, 1, 0, 0, 0, 0, 0, 1, 1] and (t.num_model_tokens, t.num_observation_tokens) == (5, 5)


@pytest.mark.parametrize(("size", "fits"), [(1, True), (2, False), (3, False)])
def test_an_observation_fits_when_a_token_is_left_for_the_model(size, fits):
    t = transcript(response_length=6)
    t.add_model(wrote(5, 6, 7, 8))
    assert t.add_observation([9] * size) is fits
    assert (t.used, t.dropped_observation_tokens) == ((5, 0) if fits else (4, size))
    if fits:
        t.add_model(wrote(4))
    output = t.output("eos" if fits else "tool_budget", 3)
    assert output.response_ids == ([5, 6, 7, 8, 9, 4] if fits else [5, 6, 7, 8])
    assert output.response_mask == ([1, 1, 1, 1, 0, 1] if fits else [1] * 4)


@pytest.mark.parametrize(("size", "fits"), [(1, True), (2, False)])
def test_the_model_s_length_counts_as_the_budget_does(size, fits):
    t = transcript(response_length=100, model_len=8)
    t.add_model(wrote(5, 6, 7, 8))
    assert t.add_observation([9] * size) is fits
    assert t.room(500, None) == (1 if fits else 2)


def test_a_call_asks_for_the_least_of_limit_rest_and_caller():
    t, asked = transcript(response_length=100), []
    while room := t.room(500, 30):
        asked.append(room)
        t.add_model(wrote(*[7] * room))
    assert asked == [30, 30, 30, 10] and t.used == 100 and t.room(500, 30) == 0


@pytest.mark.parametrize(("asked", "per_call", "expected"), [(500, None, 10), (4, None, 4), (4, 3, 3), (0, None, 0), (-1, None, 0), (500, 20, 10)])
def test_room_of_the_first_call(asked, per_call, expected):
    assert transcript().room(asked, per_call) == expected


def test_a_prompt_of_the_model_s_length_leaves_no_room():
    assert transcript(prompt=range(8), model_len=8).room(10, None) == 0
    assert transcript(prompt=range(9), model_len=8).room(10, None) == 0


def test_the_worked_example_across_two_versions():
    t = transcript(response_length=10)
    t.add_model(wrote(11, 12, 13, 14, 15, versions=[4, 4, 4, 5, 5]))
    assert t.add_observation([20, 21, 22])
    t.add_model(wrote(16, 17, versions=5))
    output = t.output("length", 4)
    assert output.rollout_versions == [4, 4, 4, 5, 5, -1, -1, -1, 5, 5]
    assert output.response_mask == [1, 1, 1, 1, 1, 0, 0, 0, 1, 1]
    assert output.response_logprobs == [-0.5] * 5 + [0.0] * 3 + [-0.5] * 2
    assert t.versions_spanned == 2 and t.room(10, None) == 0 and output.stop_reason == "length"


def test_version_0_is_a_version():
    t = transcript()
    assert t.versions_spanned == 0
    t.add_model(wrote(5, 6, versions=[0, 1]))
    assert t.versions_spanned == 2


def test_an_attempt_aborted_before_its_first_token_leaves_no_trace():
    t = transcript()
    t.add_model(GenerateResult([], [], [], "abort"))
    t.add_model(wrote(5, versions=4))
    assert t.output("eos", 2).rollout_versions == [4] and t.versions_spanned == 1


def test_observations_without_an_answer_leave_the_row():
    t = transcript()
    t.add_model(wrote(5, 6))
    assert t.add_observation([7]) and t.add_observation([8, 9])
    for _ in range(2):
        output = t.output("session_timeout", 3, reward_score=0.5, turn_scores=[1.0])
        assert output.response_ids == [5, 6] and output.reward_score == 0.5 and t.dropped_observation_tokens == 3
        assert output.extra_fields == {"turn_scores": [1.0], "tool_rewards": []}


def test_a_row_without_a_model_token_is_a_failed_session():
    t = transcript()
    t.add_observation([7])
    with pytest.raises(SessionFailed) as error:
        t.output("length", 2)
    assert error.value.reason == "empty_output"


def test_what_goes_past_the_budget_is_cut_from_all_lists():
    t = transcript(response_length=2)
    t.add_model(wrote(5, 6, 7, versions=[1, 2, 3]))
    output = t.output("length", 2)
    assert (output.response_ids, output.rollout_versions, len(output.response_logprobs)) == ([5, 6], [1, 2], 2)


@pytest.mark.parametrize(
    "result", [GenerateResult([1, 2], [-0.1], [0, 0], "eos"), GenerateResult([1, 2], [-0.1, -0.1], [0], "eos"), GenerateResult([1], [], [0], "eos")]
)
def test_lists_that_are_not_one_to_one_are_refused(result):
    t = transcript()
    with pytest.raises(ProtocolError, match="log-prob and version"):
        t.add_model(result)
    assert t.used == 0


def test_a_run_without_log_probs_records_none():
    t = transcript(with_log_probs=False)
    t.add_model(GenerateResult([1, 2], [], [0, 0], "eos"))
    t.add_observation([3])
    t.add_model(GenerateResult([4], [], [0], "eos"))
    assert t.output("eos", 4).response_logprobs is None


steps = st.lists(st.tuples(st.booleans(), st.lists(st.integers(3, 50), max_size=6)), max_size=8)


@given(steps, st.integers(1, 20), st.integers(1, 25))
def test_a_row_is_aligned_within_its_budget_and_keeps_the_model_s_tokens_in_order(steps, response_length, model_len):
    t, written = transcript(response_length, model_len=model_len), []
    for is_model, ids in steps:
        if is_model:
            ids = ids[: t.room(100, None)]
            t.add_model(wrote(*ids))
            written += ids
        else:
            left = t.left
            assert t.add_observation(ids) is (len(ids) < left)
        assert t.used <= max(0, min(response_length, model_len - 2)) and t.ids[:2] == [1, 2]
    if not written:
        return
    output = t.output("eos", 2)
    check_outputs([output], OutputRules(prompt_length=1 << 20, response_length=response_length, with_log_probs=output.response_logprobs is not None))
    assert [token for token, mask in zip(output.response_ids, output.response_mask, strict=True) if mask] == written

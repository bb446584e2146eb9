"""One session: aligned rows with a reward, or exactly one reason."""

import asyncio
import logging

import pytest

from streamrl.config.rollout import AgentConfig, Timeouts, ValKwargs
from streamrl.errors import ConfigError, DataError, SessionFailed
from streamrl.protocol.fields import trajectory_columns, trajectory_tag
from streamrl.protocol.keys import request_seed
from streamrl.protocol.validation import ValQuestion
from streamrl.rollout import AgentLoopBase, AgentLoopOutput, check_agent_names, register_agent_loop
from streamrl.rollout.registry import LoopEntry, agent_loop, read_loops
from streamrl.testing import JumpingClock
from tests.rollout.fakes import EOS, EqualScorer, ScriptedGenerate, lease, part, row, runner_of


@register_agent_loop("test_outputs")
class OutputsLoop(AgentLoopBase):
    """Returns what the row's ``outputs`` column holds."""

    async def run(self, sampling, **row):
        return row["outputs"]


@register_agent_loop("test_raises")
class RaisingLoop(AgentLoopBase):
    async def run(self, sampling, **row):
        raise ZeroDivisionError("in the loop")


@register_agent_loop("test_stubborn")
class StubbornLoop(AgentLoopBase):
    """Waits for ever and swallows its first cancellation."""

    async def run(self, sampling, **row):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)


def output(**changes):
    fields = dict(prompt_ids=[1], response_ids=[5, EOS], response_mask=[1, 1], response_logprobs=[-0.1, -0.2], rollout_versions=[0, 0], stop_reason="eos")
    return AgentLoopOutput(**{**fields, **changes})


def run(runner, *, the_lease=None, session_id=1, retry=0):
    return asyncio.run(runner.run(the_lease or lease(), session_id, retry))


def failure(runner, **kwargs):
    with pytest.raises(SessionFailed) as error:
        run(runner, **kwargs)
    return error.value


def with_outputs(*outputs, **kwargs):
    return runner_of(ScriptedGenerate(), **kwargs), lease(row(agent_name="test_outputs", outputs=list(outputs)))


def test_a_session_gives_one_scored_row_with_the_engine_s_own_tokens():
    generate, scorer = ScriptedGenerate(part("5", version=4)), EqualScorer()
    (trajectory,) = run(runner_of(generate, scorer=scorer))
    assert str(trajectory.key) == "a1_1_0" and trajectory.reward == 1.0 and trajectory.reward_extra == {"score": 1.0, "acc": 1.0}
    assert trajectory.prompt_ids == [*b"<2+3=>"] and trajectory.response_ids == [ord("5"), EOS] and trajectory.response_mask == [1, 1]
    assert trajectory.rollout_versions == [4, 4] and trajectory.response_logprobs == [-0.5, -0.5]
    assert trajectory.num_turns == 2 and trajectory.stop_reason == "eos" and trajectory.extra == {"turn_scores": [], "tool_rewards": []}
    assert trajectory.row == row()
    told = {"index": 4, "num_turns": 2, "final_answer": "5", "tool_outcomes": {}, "turn_scores": [], "tool_rewards": []}
    assert scorer.seen == [("5", told)]


def test_sampling_follows_the_configuration_and_the_session_s_own_seed():
    generate = ScriptedGenerate(part("5"), part("5"), part("5"))
    runner = runner_of(generate, temperature=0.7, top_p=0.9, top_k=3)
    for session_id, retry in ((0, 0), (1, 0), (1, 1)):
        run(runner, session_id=session_id, retry=retry)
    first = generate.requests[0].sampling
    assert (first.max_tokens, first.temperature, first.top_p, first.top_k) == (6, 0.7, 0.9, 3)
    assert [r.sampling.seed for r in generate.requests] == [request_seed(7, "a1", s, r) for s, r in ((0, 0), (1, 0), (1, 1))]
    assert len({r.request_id for r in generate.requests}) == 3


def test_another_attempt_keeps_the_seed_and_has_its_own_request_id():
    generate = ScriptedGenerate(part("5"), part("5"))
    runner = runner_of(generate)
    run(runner), run(runner, the_lease=lease(attempt=2))
    assert generate.requests[0].sampling.seed == generate.requests[1].sampling.seed
    assert generate.requests[0].request_id != generate.requests[1].request_id


def test_an_aborted_call_is_resumed_and_scored_as_one_answer():
    scorer = EqualScorer()
    (trajectory,) = run(runner_of(ScriptedGenerate(part("12", "abort", version=3), part("3", version=4)), scorer=scorer))
    assert trajectory.rollout_versions == [3, 3, 4, 4] and scorer.seen[0][0] == "123" and trajectory.min_version == 3


def test_without_log_probs_rows_have_none():
    (trajectory,) = run(runner_of(ScriptedGenerate(part("5")), calculate_log_probs=False))
    assert trajectory.response_logprobs is None


def test_a_prompt_of_exactly_the_limit_fits():
    assert len(run(runner_of(ScriptedGenerate(part("5")), max_prompt_length=6))) == 1


def test_overlong_prompts_follow_the_policy():
    dropped = failure(runner_of(ScriptedGenerate(), max_prompt_length=5))
    assert (dropped.reason, dropped.retryable) == ("overlong", False)
    (trajectory,) = run(runner_of(ScriptedGenerate(part("5")), max_prompt_length=5, overlong_prompt="truncate_left"))
    assert trajectory.prompt_ids == [*b"2+3=>"]
    with pytest.raises(DataError, match="got 6"):
        run(runner_of(ScriptedGenerate(), max_prompt_length=5, overlong_prompt="error"))


def test_text_that_is_no_message_list_ends_the_run_and_is_not_templated():
    with pytest.raises(DataError, match="list of messages"):
        run(runner_of(ScriptedGenerate()), the_lease=lease(row() | {"raw_prompt": "<2+3=>"}))


def test_a_reward_failure_is_a_reward_error_and_never_zero():
    assert failure(runner_of(ScriptedGenerate(part("5")), scorer=EqualScorer(error="no key"))).reason == "reward_error"


def test_a_row_that_the_learner_scores_comes_without_a_reward_and_says_so_in_its_tag():
    (trajectory,) = run(runner_of(ScriptedGenerate(part("5")), scorer=EqualScorer(error="not to be called", later=True)))
    assert trajectory.reward is None and trajectory.reward_extra == {} and "rm_scores" not in trajectory_columns([trajectory])
    assert trajectory_tag(trajectory, 1, 0, 0)["unscored"] == 1
    with pytest.raises(SessionFailed, match=r"reward\.reward_model scores later"):
        run(runner_of(ScriptedGenerate(part("5"), part("5")), scorer=EqualScorer(later=True), greedy_baseline=True))
    (scored,) = run(runner_of(ScriptedGenerate(part("5"))))
    assert "unscored" not in trajectory_tag(scored, 1, 0, 0)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_loop_s_own_reward_must_be_finite(reward):
    runner, the_lease = with_outputs(output(reward_score=reward))
    assert failure(runner, the_lease=the_lease).reason == "reward_error"


def test_a_loop_s_own_reward_is_not_scored_again():
    scorer = EqualScorer(error="not to be called")
    runner, the_lease = with_outputs(output(reward_score=0.5), scorer=scorer)
    assert run(runner, the_lease=the_lease)[0].reward == 0.5


def test_a_loop_exception_is_a_loop_error_with_one_traceback_per_kind(caplog):
    runner = runner_of(ScriptedGenerate())
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert failure(runner, the_lease=lease(row(agent_name="test_raises"))).reason == "loop_error"
    assert len([record for record in caplog.records if record.exc_info]) == 1


def test_no_output_and_no_token_are_empty_outputs():
    for outputs in ((), (output(response_ids=[], response_mask=[], response_logprobs=[], rollout_versions=[]),)):
        runner, the_lease = with_outputs(*outputs)
        assert failure(runner, the_lease=the_lease).reason == "empty_output"


def test_several_outputs_share_the_reward_of_the_last_one():
    runner, the_lease = with_outputs(output(), output(response_ids=[ord("5"), EOS]))
    rows = run(runner, the_lease=the_lease)
    assert [str(r.key) for r in rows] == ["a1_1_0", "a1_1_1"] and [r.reward for r in rows] == [1.0, 1.0]


@pytest.mark.parametrize(
    "bad",
    [
        [output(response_mask=[1])],
        [output(response_logprobs=[-0.1])],
        [output(response_mask=[1, 0])],
        [output(extra_fields={"turn_scores": []})],
        [output(), output(extra_fields={"turn_scores": [], "tool_rewards": [], "more": 1})],
        [output(), output(response_logprobs=None)],
        [output(response_logprobs=None)],
        [output(response_ids=[5, -1])],
        [output(response_ids=[5, 1 << 40])],
        [output(response_ids=[5, 0.5])],
        [output(prompt_ids=[-1])],
        [output(prompt_ids=[1] * 9)],
        [output(response_mask=[1, 7])],
        [output(response_logprobs=[-0.1, 5.0])],
        [output(response_logprobs=[-0.1, None])],
        [output(rollout_versions=[0, -1])],
        [output(rollout_versions=[0, None])],
        [output(response_mask=[0, 1])],
        [output(stop_reason=None)],
        [output(extra_fields={"turn_scores": [], "tool_rewards": [], "x": object()})],
        ["no output"],
        [output(response_ids=[5] * 7, response_mask=[1] * 7, response_logprobs=[-0.1] * 7, rollout_versions=[0] * 7)],
    ],
)
def test_misaligned_outputs_are_a_loop_error(bad):
    runner, the_lease = with_outputs(*bad)
    assert failure(runner, the_lease=the_lease).reason == "loop_error"


def test_a_session_past_its_deadline_ends_even_when_it_swallows_the_cancellation():
    runner = runner_of(ScriptedGenerate(), clock=JumpingClock(), timeouts=Timeouts(session_s=5.0))
    assert failure(runner, the_lease=lease(row(agent_name="test_stubborn"))).reason == "session_timeout"


def test_cancelling_a_session_reaches_the_engine():
    generate = ScriptedGenerate("hang")

    async def work():
        task = asyncio.create_task(runner_of(generate).run(lease(), 0, 0))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)

    asyncio.run(work())
    assert generate.cancelled == 1


def test_unknown_loops_are_refused_at_start_up_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'nothing' \(known: .*single_turn_agent"):
        check_agent_names(["single_turn_agent", "nothing"])
    unknown = failure(runner_of(ScriptedGenerate()), the_lease=lease(row(agent_name="nothing")))
    assert (unknown.reason, unknown.retryable) == ("loop_error", False)


def test_a_loop_name_stands_for_one_class():
    with pytest.raises(ValueError, match="single_turn_agent"):
        register_agent_loop("single_turn_agent")(RaisingLoop)
    assert agent_loop("single_turn_agent")[0] is not RaisingLoop


def validated(runner, *rows):
    return asyncio.run(runner.evaluate([ValQuestion(row, number) for number, row in enumerate(rows)]))


def test_validation_is_greedy_in_row_order_and_failures_have_no_score():
    generate = ScriptedGenerate(part("5"), part("4"), OSError("gone"))
    results = validated(runner_of(generate, temperature=0.7, val_kwargs=ValKwargs(), max_sessions_per_actor=1), row(), row(), row())
    assert [result.score for result in results] == [1.0, 0.0, None]
    assert [result.reason for result in results] == [None, None, "engine_error"]
    assert "gone" in results[2].error and results[0].error == ""
    assert results[0].extra["acc"] == 1.0 and results[0].versions is not None
    assert {r.sampling.temperature for r in generate.requests} == {0.0} and len({r.request_id for r in generate.requests}) == 3


def test_validation_of_no_rows_is_no_scores():
    assert validated(runner_of(ScriptedGenerate())) == []


def test_sessions_of_a_group_share_one_greedy_score_which_is_no_row():
    generate = ScriptedGenerate(*[part("5")] * 3)

    async def work():
        runner = runner_of(generate, n=2, temperature=0.7, greedy_baseline=True)
        rows = await asyncio.gather(*(runner.run(lease(), session_id, 0) for session_id in range(2)))
        assert runner._greedy._shared == {}, "nothing of a group stays"
        return rows

    groups = asyncio.run(work())
    assert [[str(r.key) for r in rows] for rows in groups] == [["a1_0_0"], ["a1_1_0"]]
    assert {r.extra["reward_baselines"] for rows in groups for r in rows} == {1.0}
    assert sorted(r.sampling.temperature for r in generate.requests) == [0.0, 0.7, 0.7]
    assert len({r.request_id for r in generate.requests}) == 3


def test_a_failed_greedy_session_fails_the_session_and_a_retry_makes_another():
    class GreedyFailsOnce:
        def __init__(self):
            self.failed = 0

        async def __call__(self, request):
            if request.sampling.temperature == 0.0 and not self.failed:
                self.failed += 1
                raise OSError("gone")
            return part("5")

    async def work():
        runner = runner_of(GreedyFailsOnce(), greedy_baseline=True)
        with pytest.raises(SessionFailed) as error:
            await runner.run(lease(), 0, 0)
        assert error.value.reason == "engine_error"
        return await runner.run(lease(), 0, 1)

    assert asyncio.run(work())[0].extra["reward_baselines"] == 1.0


def test_a_greedy_session_ends_with_the_last_session_of_its_group():
    generate = ScriptedGenerate("hang", "hang")

    async def work():
        task = asyncio.create_task(runner_of(generate, greedy_baseline=True).run(lease(), 0, 0))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.01)

    asyncio.run(work())
    assert len(generate.requests) == generate.cancelled == 2


def test_a_log_prob_that_is_not_finite_fails_its_session_alone():
    runner, the_lease = with_outputs(output(response_logprobs=[-0.1, float("nan")]))
    assert failure(runner, the_lease=the_lease).reason == "loop_error"


def test_turn_scores_are_rewards_at_the_end_of_their_turns_only_when_asked():
    turns = output(response_ids=[5, 6, 7, EOS], response_mask=[1, 0, 1, 1], response_logprobs=[-0.1, 0.0, -0.1, -0.2], rollout_versions=[0, -1, 0, 0])
    turns.turn_ends, turns.extra_fields = [0, 3], {"turn_scores": [0.25, 0.5], "tool_rewards": []}
    turns.reward_score = 1.0
    for turn_level, expected in ((False, [0.0, 0.0, 0.0, 1.0]), (True, [0.25, 0.0, 0.0, 1.5])):
        runner, the_lease = with_outputs(turns, turn_level=turn_level)
        rows = run(runner, the_lease=the_lease)
        assert trajectory_columns(rows)["rm_scores"][0].tolist() == expected


def test_a_row_may_ask_for_greedy_answers_in_training():
    generate = ScriptedGenerate(part("5"), part("5"))
    run(runner_of(generate, temperature=0.7), the_lease=lease(row(__do_sample__=False)))
    run(runner_of(generate, temperature=0.7), the_lease=lease(row(__do_sample__=True)))
    assert [request.sampling.temperature for request in generate.requests] == [0.0, 0.7]


def test_a_loop_that_is_declared_but_broken_ends_the_run_and_not_one_session_after_another(tmp_path):
    broken = tmp_path / "loops.yaml"
    broken.write_text("- {name: ours, class_path: tests.rollout.test_runner.OutputsLoop}\n")
    runner = runner_of(ScriptedGenerate(), agent=AgentConfig(agent_loop_config_path=str(broken)))
    read_loops(str(broken))["ours"] = LoopEntry("ours", "no.such.module.Loop")
    with pytest.raises(ConfigError, match=r"no\.such\.module"):
        run(runner, the_lease=lease(row(agent_name="ours")))
    with pytest.raises(ConfigError, match=r"no\.such\.module"):
        runner_of(ScriptedGenerate(), agent=AgentConfig(agent_loop_config_path=str(broken)))


@register_agent_loop("test_escapes")
class EscapingLoop(AgentLoopBase):
    """Raises what would end an event loop, or look like a cancellation from outside."""

    async def run(self, sampling, **row):
        await asyncio.sleep(0)
        raise {"exit": SystemExit(1), "interrupt": KeyboardInterrupt(), "cancelled": asyncio.CancelledError(), "base": GoneError()}[row["escape"]]


class GoneError(BaseException):
    pass


class MuteError(Exception):
    def __str__(self):
        raise ValueError("no words")


@register_agent_loop("test_mute")
class MuteLoop(AgentLoopBase):
    async def run(self, sampling, **row):
        raise MuteError


@pytest.mark.parametrize("escape", ["exit", "interrupt", "cancelled", "base"])
def test_what_would_end_the_event_loop_fails_its_session_only(escape):
    assert failure(runner_of(ScriptedGenerate()), the_lease=lease(row(agent_name="test_escapes", escape=escape))).reason == "loop_error"
    results = validated(runner_of(ScriptedGenerate(part("5"))), row(agent_name="test_escapes", escape=escape), row())
    assert [result.score for result in results] == [None, 1.0]


def test_an_error_that_cannot_say_what_it_is_is_a_loop_error():
    assert failure(runner_of(ScriptedGenerate()), the_lease=lease(row(agent_name="test_mute"))).reason == "loop_error"


def test_a_token_id_is_below_the_vocabulary_of_the_model():
    runner, the_lease = with_outputs(output(response_ids=[200, EOS]), vocab_size=200)
    assert failure(runner, the_lease=the_lease).reason == "loop_error"
    runner, the_lease = with_outputs(output(response_ids=[199, EOS]), vocab_size=200)
    assert run(runner, the_lease=the_lease)


def test_a_launch_refuses_arguments_that_an_agent_loop_does_not_take(tmp_path):
    loops = tmp_path / "loops.yaml"
    loops.write_text("- {name: ours, class_path: tests.rollout.test_runner.OutputsLoop, kwargs: {rounds: 3}}\n")
    with pytest.raises(ConfigError, match="rounds"):
        runner_of(ScriptedGenerate(), agent=AgentConfig(agent_loop_config_path=str(loops)))

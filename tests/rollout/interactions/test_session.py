"""One session's side of an interaction: a good turn, or env_error; finalized once whatever happened."""

import asyncio
import math
import threading
import time

import numpy as np
import pytest

from streamrl.errors import SessionFailed
from streamrl.rollout.interactions import BaseInteraction, Turn
from streamrl.testing import JumpingClock, StepClock
from tests.rollout.interactions.fakes import Scripted, converse, play, session_of


def failure(interaction, *answers, **kwargs):
    with pytest.raises(SessionFailed) as error:
        play(interaction, *(answers or ("a",)), **kwargs)
    assert error.value.reason == "env_error"
    return str(error.value)


def test_a_turn_carries_what_the_interaction_returned():
    interaction = Scripted((False, "again", 0.5, {"k": 1}))
    turns, score = play(interaction, "a", name="scripted", ground_truth="7")
    assert turns == [Turn(False, "again", 0.5, {"k": 1})] and score is None
    assert interaction.calls[:2] == [(call, "s1", {"name": "scripted", "ground_truth": "7"}) for call in ("start", "respond")]


def test_the_returned_instance_id_is_used_from_then_on():
    interaction = Scripted(start="room-9")
    play(interaction, "a")
    assert [id for _, id, _ in interaction.calls] == ["s1", "room-9", "room-9"]


def test_an_end_needs_no_content():
    turns, _ = play(Scripted((np.True_, None, np.float32(1.0), None)), "a", "b")
    assert turns == [Turn(True, "", 1.0, {})] and type(turns[0].should_terminate) is bool


@pytest.mark.parametrize(
    "answer",
    [
        "text",
        (False, "text", 0.0),
        ("no", "text", 0.0, {}),
        (False, None, 0.0, {}),
        (False, 3, 0.0, {}),
        (False, "text", math.nan, {}),
        (False, "text", math.inf, {}),
        (False, "text", None, {}),
        (False, "text", 0.0, []),
        ZeroDivisionError("in the environment"),
        StopIteration(),
    ],
)
def test_a_broken_answer_is_env_error_and_still_finalized(answer):
    interaction = Scripted(answer)
    message = failure(interaction)
    assert "generate_response of interaction 'scripted'" in message
    assert interaction.count("finalize") == 1


@pytest.mark.parametrize("start", [ValueError("no room"), 7, ""])
def test_a_failed_start_is_env_error_and_finalized(start):
    interaction = Scripted(start=start)
    assert "start_interaction" in failure(interaction)
    assert interaction.count("finalize") == 1 and interaction.count("respond") == 0


@pytest.mark.parametrize("mode", ["hang", "swallow"])
def test_a_late_answer_is_env_error_even_when_it_swallows_its_cancellation(mode):
    interaction, clock = Scripted(mode), JumpingClock()
    assert "ends within 5 s" in failure(interaction, timeout_s=5.0, clock=clock)
    assert interaction.count("finalize") == 1


def test_an_answer_just_in_time_is_taken():
    class Slow(Scripted):
        async def generate_response(self, instance_id, messages, **kwargs):
            await clock.sleep(4.0)
            return self.answer

    async def scenario():
        running = asyncio.create_task(converse(session_of(Slow(), clock=clock), "a"))
        await asyncio.sleep(0.01)
        await clock.advance(4.0)
        return await running

    clock = StepClock()
    turns, _ = asyncio.run(scenario())
    assert turns == [Turn(False, "go on")]


def test_close_twice_finalizes_once_and_a_session_that_never_started_not_at_all():
    async def scenario():
        never, twice = Scripted(), Scripted()
        await session_of(never).close()
        session = session_of(twice)
        await session.start()
        await asyncio.gather(session.close(), session.close())
        await session.close()
        return never.count("finalize"), twice.count("finalize")

    assert asyncio.run(scenario()) == (0, 1)


def test_a_finalize_that_raises_or_hangs_is_logged_and_changes_nothing(caplog):
    turns, _ = play(Scripted(finalize=ValueError("gone")), "a")
    play(Scripted(finalize="swallow"), "a", clock=JumpingClock())
    assert len(turns) == 1
    assert [record.message for record in caplog.records] == ["finalize_interaction of interaction 'scripted' failed in session s1"] * 2


@pytest.mark.parametrize("cancellations", [1, 2])
def test_cancellation_finalizes_once(cancellations):
    """The second one arrives while finalize is under way."""

    async def scenario():
        gate, done = asyncio.Event(), asyncio.Event()

        class Gated(Scripted):
            async def finalize_interaction(self, instance_id):
                await super().finalize_interaction(instance_id)
                await gate.wait()
                done.set()

        interaction = Gated("hang")
        running = asyncio.create_task(converse(session_of(interaction), "a"))
        for _ in range(cancellations):
            await asyncio.sleep(0.01)
            running.cancel()
        await asyncio.sleep(0.01)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.wait_for(done.wait(), 1.0)
        return interaction.count("finalize")

    assert asyncio.run(scenario()) == 1


def test_plain_methods_run_in_threads_and_a_blocking_one_holds_up_nobody():
    class Plain(BaseInteraction):
        def generate_response(self, instance_id, messages, **kwargs):
            threads.add(threading.current_thread())
            release.wait(5.0)
            return True, "done", 1.0, {}

    async def scenario():
        running = [asyncio.create_task(converse(session_of(interaction, instance_id=str(i)), "a")) for i in range(40)]
        began = time.monotonic()
        while len(threads) < 40:
            await asyncio.sleep(0.005)
            assert time.monotonic() - began < 5.0
        release.set()
        return await asyncio.gather(*running)

    threads, release, interaction = set(), threading.Event(), Plain({})
    assert [turns for turns, _ in asyncio.run(scenario())] == [[Turn(True, "done", 1.0)]] * 40
    assert threading.main_thread() not in threads


def test_a_plain_method_that_never_returns_is_env_error():
    class Stuck(BaseInteraction):
        def generate_response(self, instance_id, messages, **kwargs):
            release.wait(30.0)

    release = threading.Event()
    began = time.monotonic()
    assert "generate_response" in failure(Stuck({}), timeout_s=0.1)
    assert time.monotonic() - began < 2.0
    release.set()


def test_the_interaction_cannot_change_what_the_model_is_shown():
    class Meddler(Scripted):
        async def generate_response(self, instance_id, messages, **kwargs):
            messages[0]["content"] = "changed"
            messages.clear()
            return self.answer

    async def scenario():
        session, messages = session_of(Meddler()), [{"role": "user", "content": "begin"}]
        await session.start()
        await session.respond(messages)
        await session.close()
        return messages

    assert asyncio.run(scenario()) == [{"role": "user", "content": "begin"}]


@pytest.mark.parametrize("score", [math.nan, None, "high"])
def test_a_score_that_is_no_number_is_env_error(score):
    class Scored(Scripted):
        async def calculate_score(self, instance_id):
            return score

    interaction = Scored()
    assert "calculate_score" in failure(interaction)
    assert interaction.count("finalize") == 1

"""What a run makes of scores: who is asked, what is shaped, and that limits hold without anybody waiting for ever."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl import rewards
from streamrl.config.data import DataConfig
from streamrl.config.reward import CustomFunction, Limits, OverlongBuffer, RewardConfig, RewardModelConfig
from streamrl.errors import ConfigError, RewardError, WaitTimeout
from streamrl.protocol.answer import Answer
from streamrl.rewards import RewardManager, register_reward, register_reward_manager
from streamrl.rewards.managers import ManagerSettings, manager_class
from streamrl.rewards.managers.dapo import overlong_penalty
from streamrl.rewards.managers.limited import LimitedManager, Pace
from streamrl.rewards.slots import Slots
from streamrl.testing.clocks import StepClock
from tests.rewards.score_functions import __file__ as FUNCTIONS


@register_reward("test/managed", inline=True)
def managed(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(len(solution_str)), "brevity": -float(len(solution_str))}


@register_reward_manager("test/brief")
class Brief(RewardManager):
    def shape(self, answer, score, extra):
        return score - answer.num_tokens, extra | {"brief": True}


class Model:
    """Stands in for a judge or a server."""

    started = closed = False

    async def start(self):
        self.started = True

    def check(self):
        pass

    def child_pids(self):
        return [7]

    async def close(self):
        self.closed = True

    async def score(self, answer):
        return 0.5, {"score": 0.5, "acc": 0.5}


def answer(text="abc", style="rule", source="test/managed", **fields):
    return Answer(row={"data_source": source, "reward_model": {"style": style, "ground_truth": "x"}}, text=text, num_tokens=len(text), **fields)


def manager(length=1000, judge=None, components=(), num_actors=1, clock=None, **reward):
    options = {"judge": judge, "components": components, "num_actors": num_actors, "clock": clock}
    return rewards.build(RewardConfig(**reward), DataConfig(max_response_length=length), **options)


def score(the_answer, **options):
    return asyncio.run(manager(**options).score(the_answer))


def test_naive_takes_the_score_as_the_reward():
    assert score(answer()) == (3.0, {"score": 3.0, "acc": 3.0, "brevity": -3.0})


@pytest.mark.parametrize(("num_tokens", "penalty"), [(800, 0.0), (900, -0.5), (1000, -1.0), (1, 0.0)])
def test_dapo_takes_off_what_an_answer_near_the_limit_costs(num_tokens, penalty):
    buffer = OverlongBuffer(enable=True, len=200, penalty_factor=1.0, log=True)
    reward, extra = score(answer("x" * num_tokens), reward_manager="dapo", overlong_buffer=buffer)
    assert reward == pytest.approx(num_tokens + penalty)
    assert (extra["score"], extra["overlong_reward"], extra["overlong"]) == (num_tokens, pytest.approx(penalty), penalty < 0)
    assert score(answer("x" * num_tokens), reward_manager="dapo") == score(answer("x" * num_tokens))


@given(st.integers(1, 500), st.integers(1, 500), st.floats(0.01, 10))
def test_the_overlong_penalty_grows_to_its_factor_and_never_rewards(longest, buffer, factor):
    section = OverlongBuffer(enable=True, len=min(buffer, longest), penalty_factor=factor)
    penalties = [overlong_penalty(n, longest, section) for n in range(longest + 1)]
    assert penalties == sorted(penalties, reverse=True) and penalties[0] <= 0 and penalties[-1] == pytest.approx(-factor)


def test_gdpo_wants_every_component_as_a_finite_number():
    assert score(answer(), reward_manager="gdpo", components=("score", "brevity"))[1]["brevity"] == -3.0
    with pytest.raises(RewardError, match=r"component 'format' of algorithm\.gdpo_reward_keys as a finite number, got None"):
        score(answer(), reward_manager="gdpo", components=("format",))


def test_a_manager_of_user_code_goes_by_its_name_or_its_place():
    assert score(answer(), reward_manager="test/brief") == (0.0, {"score": 3.0, "acc": 3.0, "brevity": -3.0, "brief": True})
    assert manager_class(f"{__name__}:Brief") is Brief
    with pytest.raises(ConfigError, match=r"got 'breif' \(known: dapo, gdpo, limited, naive"):
        manager(reward_manager="breif")
    with pytest.raises(ConfigError, match=r"a subclass of RewardManager, got .*Model"):
        manager_class(f"{__name__}:Model")
    with pytest.raises(ValueError, match="second one for 'test/brief'"):
        register_reward_manager("test/brief")(type("Other", (RewardManager,), {}))


def test_a_reward_of_user_code_that_is_not_finite_is_an_error():
    cls = type("Broken", (RewardManager,), {"shape": lambda self, answer, score, extra: (float("nan"), extra)})
    register_reward_manager("test/broken")(cls)
    with pytest.raises(RewardError, match=r"a reward is finite, got nan from Broken\.shape"):
        score(answer(), reward_manager="test/broken")


def test_rows_of_style_model_go_to_the_model_others_to_the_rule():
    run = manager(judge=Model())
    assert asyncio.run(run.score(answer(style="model", source="nobody")))[0] == 0.5 and asyncio.run(run.score(answer()))[0] == 3.0
    assert run.serves(answer(style="model", source="nobody").row) and not run.serves(answer(source="nobody").row)
    assert not run.scores_later(answer(style="model").row) and run.child_pids() == [7]


def test_a_custom_function_overrides_the_model():
    custom = manager(judge=Model(), custom_reward_function=CustomFunction(path=FUNCTIONS))

    async def run():
        try:
            return await custom.score(answer("x", style="model", extra_info={"num_turns": 2}))
        finally:
            await custom.close()

    assert asyncio.run(run())[0] == 1.0


def test_rows_that_the_learner_scores_are_told_apart_and_rows_without_a_scorer_are_errors():
    later = manager(reward_model=RewardModelConfig(enable=True, model_path="m"))
    assert later.scores_later(answer(style="model").row) and later.serves(answer(style="model").row) and not later.scores_later(answer().row)
    assert not manager().serves(answer(style="model").row)
    with pytest.raises(RewardError, match=r"configure reward\.judge or reward\.remote"):
        score(answer(style="model"))


def test_limited_begins_requests_evenly_and_keeps_to_its_actors_share():
    async def run():
        clock, model = StepClock(), Model()
        limits = Limits(max_requests_per_minute=120, max_concurrency=8)
        run = manager(judge=model, num_actors=2, clock=clock, reward_manager="limited", limited=limits)
        tasks = [asyncio.create_task(run.score(answer(style="model"))) for _ in range(3)]
        done = []
        for _ in range(4):
            await asyncio.sleep(0.01)
            done.append(sum(task.done() for task in tasks))
            await clock.advance(0.5)
        await asyncio.gather(*tasks)
        return done

    assert asyncio.run(run()) == [1, 1, 2, 2]  # 60 of 120 a minute: one a second


def test_a_long_answer_keeps_the_next_one_waiting():
    async def run():
        clock = StepClock()
        pace = Pace(6000, clock)  # 100 a second
        await pace.wait(250)
        second = asyncio.create_task(pace.wait(1))
        await asyncio.sleep(0)
        await clock.advance(2.4)
        early = second.done()
        await clock.advance(0.2)
        return early, second.done()

    assert asyncio.run(run()) == (False, True)


def test_limited_never_has_more_calls_than_allowed():
    async def run():
        class Counting(Model):
            now = most = 0

            async def score(self, answer):
                self.now += 1
                self.most = max(self.most, self.now)
                await asyncio.sleep(0.001)
                self.now -= 1
                return await super().score(answer)

        model = Counting()
        run = manager(judge=model, reward_manager="limited", limited=Limits(max_concurrency=3))
        await asyncio.gather(*(run.score(answer(style="model")) for _ in range(20)))
        return model.most

    assert asyncio.run(run()) == 3


def test_nobody_queues_behind_a_row_of_timeouts_but_a_free_slot_is_always_tried():
    async def run():
        slots, tried = Slots(1, "the scorer"), []

        async def call(name, late):
            async with slots.one():
                tried.append(name)
                await asyncio.sleep(0)
                if late:
                    raise RewardError("late") from WaitTimeout("late")

        first = await asyncio.gather(*(call(i, True) for i in range(100)), return_exceptions=True)
        refused = [error for error in first if "4 timeouts in a row" in str(error)]
        await asyncio.gather(call("again", True), return_exceptions=True)
        await call("recovered", False)
        await asyncio.gather(*(call(i, False) for i in "abc"))
        return len(refused), tried

    assert asyncio.run(run()) == (96, [0, 1, 2, 3, "again", "recovered", "a", "b", "c"])


def test_settings_reach_the_manager():
    settings = ManagerSettings(max_response_length=9, reward=RewardConfig(limited=Limits(max_concurrency=5)), num_actors=2)
    assert LimitedManager(rewards.build(RewardConfig(), DataConfig()).sources, settings)._slots._free._value == 2

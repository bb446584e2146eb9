"""Environments with reset and step, old and new, through the adapter."""

import asyncio
import threading

import pytest

from streamrl.errors import SessionFailed
from streamrl.rollout.interactions.gym import GymInteraction
from tests.rollout.interactions.fakes import converse, play, session_of

MADE = []


class Counter:
    """Reach ``goal`` by adding. ``style``: how many values step returns."""

    def __init__(self, goal=5, style=5, fails=False):
        self.goal, self.style, self.fails, self.closed, self.value = goal, style, fails, 0, 0
        self.threads = set()
        MADE.append(self)

    def reset(self, *, seed=0):
        self.value = seed
        return (self.value, {"seed": seed}) if self.style == 5 else self.value

    def step(self, action):
        self.threads.add(threading.current_thread())
        if self.fails:
            raise RuntimeError("broken")
        self.value += action
        done, reward = self.value >= self.goal, 0.5
        return {5: (self.value, reward, done, False, {}), 4: (self.value, reward, done, {}), 3: (self.value, reward, done)}[self.style]

    def close(self):
        self.closed += 1


def number(text):
    return int(text)


def gym(**config):
    return GymInteraction({"factory": f"{__name__}:Counter", "parse": f"{__name__}:number", **config})


@pytest.mark.parametrize("style", [4, 5])
def test_an_episode_of_either_style(style):
    turns, score = play(gym(factory_kwargs={"style": style}), "ready", "2", "1", seed=2)
    assert [(turn.content, turn.score, turn.should_terminate) for turn in turns] == [("2", 0.0, False), ("4", 0.5, False), ("5", 0.5, True)]
    assert score == 1.0
    assert MADE[-1].closed == 1 and threading.main_thread() not in MADE[-1].threads


def test_without_observe_first_the_first_answer_is_an_action():
    turns, _ = play(gym(observe_first=False), "3")
    assert turns[0].content == "3"


def test_what_parse_refuses_is_told_to_the_model_and_costs_a_step():
    turns, score = play(gym(observe_first=False, max_steps=2), "three", "four")
    assert turns[0].content.startswith("That is no action: invalid literal") and not turns[0].should_terminate
    assert turns[1].should_terminate and score == 0.0


def test_the_last_step_ends_the_session():
    turns, score = play(gym(observe_first=False, max_steps=2), "1", "1")
    assert [turn.should_terminate for turn in turns] == [False, True] and score == 1.0


def test_the_row_adds_arguments_of_the_factory():
    turns, _ = play(gym(observe_first=False), "3", env_kwargs={"goal": 3})
    assert turns[0].should_terminate


@pytest.mark.parametrize("env_kwargs", [{"fails": True}, {"style": 3}, {"nonsense": 1}])
def test_a_broken_environment_is_env_error_and_closed(env_kwargs):
    before = len(MADE)
    with pytest.raises(SessionFailed) as error:
        play(gym(observe_first=False), "3", env_kwargs=env_kwargs)
    assert error.value.reason == "env_error"
    assert [env.closed for env in MADE[before:]] == [1] * (len(MADE) - before)


def test_without_parse_the_action_is_the_text(tmp_path):
    (tmp_path / "echo.py").write_text(
        "class Echo:\n    def reset(self):\n        return ('a', 'b')\n    def step(self, action):\n        return action, 0, True, {}\n"
    )
    turns, _ = play(GymInteraction({"factory": f"{tmp_path}/echo.py:Echo"}), "go", "north")
    assert [turn.content for turn in turns] == ["('a', 'b')", "north"]


def test_fifty_episodes_at_once_do_not_mix():
    async def one(i):
        return await converse(session_of(interaction, instance_id=f"s{i}", env_kwargs={"goal": 1000}, seed=i), "ready", "1", "1")

    async def scenario():
        return await asyncio.gather(*map(one, range(50)))

    interaction = gym()
    for i, (turns, _) in enumerate(asyncio.run(scenario())):
        assert [turn.content for turn in turns] == [str(i), str(i + 1), str(i + 2)]
    assert not interaction._games

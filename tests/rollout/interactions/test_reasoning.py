"""Tasks of reasoning-gym: with a stand-in of the library's two calls, and with the library where it is installed."""

import importlib.util
import sys
from types import ModuleType

import pytest

from streamrl.errors import ConfigError, SessionFailed
from streamrl.rollout.interactions import load_interactions
from streamrl.rollout.interactions.reasoning import FEEDBACK, ReasoningGymInteraction, _dataset, answer_in
from tests.rollout.interactions.fakes import play


class Sums:
    """Entry i of seed s asks for s + i; "almost" is half right."""

    def __init__(self, seed, size, offset=0):
        self.entries = [{"question": f"{seed}+{i}=", "answer": str(seed + i + offset), "metadata": {}} for i in range(size)]

    def __getitem__(self, i):
        return self.entries[i]

    def score_answer(self, answer, entry):
        return 0.5 if answer == "almost" else float(answer == entry["answer"])


@pytest.fixture
def library(monkeypatch):
    """The module that ``import reasoning_gym`` finds."""
    module = ModuleType("reasoning_gym")
    module.create_dataset = lambda name, seed, size, **options: {"sums": Sums}[name](seed, size, **options)
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    _dataset.cache_clear()
    yield
    _dataset.cache_clear()


def test_the_answer_stands_between_tags():
    assert answer_in("<answer>1</answer> wait <answer>\n2 </answer>.") == "2"
    assert answer_in(" 3\n") == "3"


def test_right_ends_wrong_brings_feedback(library):
    turns, score = play(ReasoningGymInteraction({}), "4", "<answer>almost</answer>", "<answer>12</answer>", dataset="sums", seed=7, index=5)
    assert [(turn.should_terminate, turn.score) for turn in turns] == [(False, 0.0), (False, 0.5), (True, 1.0)]
    assert turns[0].content == FEEDBACK and score == 1.0


def test_the_last_turn_ends_with_the_last_score(library):
    turns, score = play(ReasoningGymInteraction({"max_turns": 2}), "4", "almost", dataset="sums")
    assert turns[-1].should_terminate and score == 0.5


def test_solved_at_decides_what_is_good_enough(library):
    turns, _ = play(ReasoningGymInteraction({"solved_at": 0.5}), "almost", dataset="sums")
    assert turns[0].should_terminate and turns[0].score == 0.5


def test_a_stored_entry_and_options_are_used(library):
    entry = {"question": "?", "answer": "ok", "metadata": {}}
    assert play(ReasoningGymInteraction({}), "ok", dataset="sums", entry=entry)[1] == 1.0
    assert play(ReasoningGymInteraction({}), "103", dataset="sums", seed=3, options={"offset": 100})[1] == 1.0


@pytest.mark.parametrize("kwargs", [{}, {"dataset": "nobody"}, {"dataset": "sums", "size": 2, "index": 2}, {"dataset": "sums", "options": {"x": 1}}])
def test_a_row_without_a_task_is_env_error(library, kwargs):
    with pytest.raises(SessionFailed) as error:
        play(ReasoningGymInteraction({}), "1", **kwargs)
    assert error.value.reason == "env_error"


def test_without_the_library_the_start_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # the import then fails
    (tmp_path / "a.yaml").write_text("interaction: [{class_name: reasoning_gym}]")
    with pytest.raises(ConfigError, match=r"^\$\.rollout\.multi_turn\.interaction_config_path: .*streamrl\[reasoning-gym\]"):
        load_interactions(str(tmp_path / "a.yaml"))


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
def test_a_chain_sum_of_the_library_itself():
    import reasoning_gym

    entry = reasoning_gym.create_dataset("chain_sum", seed=7, size=5)[4]
    turns, score = play(ReasoningGymInteraction({}), "x", f"<answer>{entry['answer']}</answer>", dataset="chain_sum", seed=7, size=5, index=4)
    assert len(turns) == 2 and score == 1.0

"""The tutor and the grid, with scripted answers."""

import asyncio
from decimal import Decimal

import pytest

from streamrl.errors import SessionFailed
from streamrl.rollout.interactions.grid import RULES, GridInteraction, opening
from streamrl.rollout.interactions.tutor import GENERAL_HINT, NO_NUMBER, TutorInteraction, final_number
from tests.rollout.interactions.fakes import converse, play, session_of


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 72", "72"),
        ("#### $1,072.50 dollars, not 3", "1072.50"),
        ("#### -4", "-4"),
        ("first 3, then 4.", "4"),
        ("#### 5 #### 6", "6"),
        ("7 ####", None),
        ("", None),
        ("seven", None),
        ("1234567890123456789012345678901", "1234567890123456789012345678901"),
    ],
)
def test_the_final_number(text, number):
    assert final_number(text) == (None if number is None else Decimal(number))


def test_a_right_answer_ends_with_score_one():
    turns, score = play(TutorInteraction({}), "6*12 #### 72.0", ground_truth="72")
    assert [(turn.should_terminate, turn.score) for turn in turns] == [(True, 1.0)] and score == 1.0


def test_wrong_answers_bring_the_rows_hints_then_a_general_one_then_the_end():
    turns, score = play(TutorInteraction({"max_hints": 3}), "1", "hm", "none", "2", ground_truth=72, hints=["Think of May."])
    assert [turn.content for turn in turns[:3]] == ["Think of May.", NO_NUMBER, NO_NUMBER]
    assert turns[3].should_terminate and score == 0.0
    turns, score = play(TutorInteraction({"max_hints": 1}), "1", "72", ground_truth=72)
    assert turns[0].content == GENERAL_HINT and score == 1.0


def test_no_hints_means_one_try():
    turns, _ = play(TutorInteraction({"max_hints": 0}), "1", ground_truth=72)
    assert turns[0].should_terminate


@pytest.mark.parametrize("kwargs", [{}, {"ground_truth": "many"}, {"ground_truth": "7", "hint": "x"}])
def test_a_row_that_the_tutor_cannot_use_is_env_error(kwargs):
    with pytest.raises(SessionFailed, match="correct the row"):
        play(TutorInteraction({}), "1", **kwargs)


def test_a_walk_to_the_goal():
    grid = GridInteraction({"height": 2, "width": 3})
    turns, score = play(grid, "I go right.", "RIGHT", "left or rather down", start=[0, 0], goal=[1, 2], walls=[[1, 0]])
    assert [turn.content for turn in turns] == [".A.\n#.G", "..A\n#.G", "You are at the goal."]
    assert [turn.score for turn in turns] == [0.0, 0.0, 1.0] and score == 1.0
    assert not grid._grids


def test_walls_borders_and_words_that_are_no_moves_cost_a_step():
    grid = GridInteraction({"height": 2, "width": 3, "max_steps": 3})
    turns, score = play(grid, "down", "upwards!", "left", start=[0, 0], goal=[1, 2], walls=[[1, 0]])
    assert turns[0].content == "The way is blocked.\nA..\n#.G"
    assert turns[1].content.startswith("I see no move")
    assert turns[2].should_terminate and turns[2].content == "No steps are left." and score == 0.0


def test_the_opening_shows_the_first_picture():
    assert opening({"height": 2, "width": 2}, start=[0, 0], goal=[1, 1]) == f"{RULES}\nA.\n.G"
    assert opening(seed=3) == opening(seed=3)
    assert len({opening(seed=seed) for seed in range(20)}) > 5


@pytest.mark.parametrize(
    "kwargs",
    [
        {"start": [0, 0], "goal": [0, 0]},
        {"start": [0, 0], "goal": [3, 3]},
        {"start": [0, 0], "goal": [0, 1], "walls": [[0, 1]]},
        {"start": [0, 0], "goal": [2, 2], "walls": [[1, 2], [2, 1]]},
        {"start": "here"},
        {"walls": [[row, column] for row in range(3) for column in range(3)]},
    ],
)
def test_a_grid_that_nobody_can_solve_is_refused(kwargs):
    with pytest.raises(ValueError, match="correct the row"):
        opening(**kwargs)
    with pytest.raises(SessionFailed):
        play(GridInteraction({}), "up", **kwargs)


def test_fifty_sessions_over_one_object_do_not_mix():
    async def one(i):
        truth = 100 + i
        session = session_of(tutor, instance_id=f"s{i}", ground_truth=truth, hints=[f"hint for {i}"])
        return await converse(session, str(truth + 1), str(truth if i % 2 else 0))

    async def scenario():
        return await asyncio.gather(*map(one, range(50)))

    tutor = TutorInteraction({"max_hints": 1})
    for i, (turns, score) in enumerate(asyncio.run(scenario())):
        assert turns[0].content == f"hint for {i}" and score == i % 2
    assert not tutor._states

"""Where rewards stand, and sessions of several outputs: one sample each, whatever their rows are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.algorithms import advantages
from tests.algorithms.answers import ALL, GROUP, TOKEN, batch_of, estimate, rows

OUTCOME = [name for name in GROUP if "token_baseline" not in name]


def session(scores: dict[int, float], masks: dict[int, list[int]] | None = None, sibling: float = 0.25) -> dict[str, Any]:
    """One session whose outputs have these scores by index, then a sibling of one row."""
    masks = masks or {index: [1, 1] for index in scores}
    batch = batch_of([*masks.values(), [1, 1]], [*scores.values(), sibling], ["A"] * (len(scores) + 1))
    return batch | {"session_ids": np.array([0] * len(scores) + [1]), "output_index": np.array([*scores, 0])}


def test_a_reward_on_an_observation_moves_to_the_nearest_model_token():
    rewards, mask = torch.tensor([[0.25, 0, 0.5, 0, 1], [1, 2, 4, 8, 16]]), torch.tensor([[0, 1, 0, 1, 0], [0] * 5])
    assert advantages.place_rewards(rewards, mask).tolist() == [[0, 0.75, 0, 1, 0], [1, 2, 4, 8, 16]]


def test_an_outcome_stands_on_the_last_model_token():
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]])
    assert advantages.outcome_rewards(torch.tensor([2.0, 3.0, 4.0]), mask).tolist() == [[0, 2, 0], [0, 0, 3], [0, 0, 4]]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(-8, 8)), max_size=9))
def test_placing_loses_no_reward_and_twice_is_once(tokens):
    mask, rewards = torch.tensor([[bit for bit, _ in tokens]]), torch.tensor([[float(reward) for _, reward in tokens]])
    placed = advantages.place_rewards(rewards, mask)
    assert placed.sum() == rewards.sum() and torch.equal(advantages.place_rewards(placed, mask), placed)
    assert not placed[mask == 0].any() or not mask.any()


@pytest.mark.parametrize("name", OUTCOME)
def test_the_score_of_a_session_is_that_of_its_last_output_compared_as_numbers(name):
    columns = {"gdpo_reward_keys": ("correct",)} if name == "gdpo" else {}
    got, _ = estimate(name, session({0: 5.0, 10: 1.0, 9: 0.0}), **columns)
    alone = session({10: 1.0})
    if name == "opo":
        alone["response_mask"] = torch.tensor([[1, 1], [1, 1]])
        expected = [1 - (6 * 1 + 2 * 0.25) / 8, 0.25 - (6 * 1 + 2 * 0.25) / 8]
    elif name in ("gdpo", "reinforce_plus_plus_baseline"):  # whitened over six tokens of one sign and two of the other
        sizes = [1.0] * 6 + [-1.0] * 2
        expected = [(side - np.mean(sizes)) / np.std(sizes, ddof=1) for side in (1.0, -1.0)]
    else:
        expected = estimate(name, alone, **columns)[0][:, 0].tolist()
    assert got[:, 0].tolist() == pytest.approx([expected[0]] * 3 + [expected[1]], abs=1e-5)


@pytest.mark.parametrize("name", OUTCOME)
def test_a_session_whose_last_output_is_masked_out_keeps_its_score(name):
    columns = {"gdpo_reward_keys": ("correct",)} if name == "gdpo" else {}
    got, _ = estimate(name, session({0: 0.0, 1: 1.0}, {0: [1, 1], 1: [0, 0]}), **columns)
    expected = estimate(name, session({0: 1.0}), **columns)[0]
    assert torch.allclose(got[[0, 2]], expected) and not got[1].any()


@pytest.mark.parametrize("name", ALL)
def test_the_order_of_a_sessions_rows_does_not_matter(name):
    batch = session({0: 0.5, 10: 1.0, 9: 0.0}, {0: [1, 0, 1], 10: [1, 1], 9: [1]})
    for mode in ("independent", "chain"):
        straight, _ = estimate(name, batch, multi_output=mode)
        shuffled, _ = estimate(name, rows(batch, [2, 3, 0, 1]), multi_output=mode)
        assert torch.allclose(shuffled, straight[[2, 3, 0, 1]], atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_sessions_of_one_output_are_the_same_in_both_modes(name):
    batch = session({0: 1.0})
    assert all(map(torch.equal, estimate(name, batch, multi_output="chain"), estimate(name, batch)))


def returns_of(name: str, batch: dict[str, Any], mode: str) -> list[list[float]]:
    return [[round(value, 6) for value in row] for row in estimate(name, batch, multi_output=mode, gamma=0.5, lam=1.0)[1].tolist()]


@pytest.mark.parametrize("copied", [True, False])
def test_independent_outputs_each_end_with_the_score_of_the_session(copied):
    batch = session({0: 1.0 if copied else 0.0, 10: 1.0}, {0: [1, 1, 0], 10: [1, 0, 1]})
    assert returns_of("reinforce_plus_plus", batch, "independent") == [[0.5, 1, 0], [0.5, 0, 1], [0.125, 0.25, 0]]


@pytest.mark.parametrize("copied", [True, False])
def test_chained_outputs_are_one_stream_that_ends_with_the_score_of_the_session(copied):
    batch = session({10: 1.0, 0: 1.0 if copied else 0.0}, {10: [1, 0, 1], 0: [1, 1, 0]})
    assert returns_of("reinforce_plus_plus", batch, "chain") == [[0.5, 0, 1], [0.125, 0.25, 0], [0.125, 0.25, 0]]


def test_a_chain_whose_last_output_has_no_token_ends_on_the_last_token_there_is():
    batch = session({0: 0.0, 1: 0.0, 2: 1.0}, {0: [1, 1], 1: [1, 0], 2: [0, 0]})
    assert returns_of("reinforce_plus_plus", batch, "chain") == [[0.25, 0.5], [1, 0], [0, 0], [0.125, 0.25]]


def test_gae_of_a_chain_is_gae_of_the_joined_row():
    batch = session({0: 0.0, 1: 1.0}, {0: [1, 0, 1], 1: [1, 1]})
    joined = batch_of([[1, 0, 1, 1, 1], [1, 1]], [1.0, 0.25], ["A", "A"])
    joined["values"] = torch.zeros(2, 5)
    joined["values"][0, [0, 2, 3, 4]] = torch.cat([batch["values"][0, [0, 2]], batch["values"][1, :2]])
    joined["values"][1, :2] = batch["values"][2, :2]
    for part, whole in zip(estimate("gae", batch, multi_output="chain"), estimate("gae", joined), strict=True):
        assert torch.allclose(torch.cat([part[0], part[1, :2]]), whole[0], atol=1e-6) and torch.allclose(part[2, :2], whole[1, :2], atol=1e-6)


@pytest.mark.parametrize("mode", ["independent", "chain"])
def test_penalties_per_token_stay_on_every_output(mode):
    batch = session({0: 1.0, 1: 1.0})
    penalised = batch | {"token_level_scores": batch["token_level_rewards"]}
    penalised["token_level_rewards"] = batch["token_level_rewards"] - torch.tensor([[0.25, 0], [0, 0], [0, 0]])
    plain, got = (estimate("remax", b, multi_output=mode, gamma=1.0)[1] for b in (batch, penalised))
    assert torch.equal(plain - got, torch.tensor([[0.25, 0], [0, 0], [0, 0]]))


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_a_lone_session_of_two_outputs_is_a_group_of_one(name):
    batch = rows(session({0: 1.0, 1: 1.0}), [0, 1])
    assert estimate(name, batch)[0].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("name", TOKEN)
def test_a_session_is_rejected_as_a_whole(name):
    batch = session({0: 0.0, 1: math.nan})
    batch["token_level_rewards"][1, 0] = math.nan
    for mode in ("independent", "chain"):
        for part, alone in zip(estimate(name, batch, multi_output=mode), estimate(name, rows(batch, [2]), multi_output=mode), strict=True):
            assert torch.equal(part[2], alone[0]) and not part[:2].any()

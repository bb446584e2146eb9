import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.algorithms import advantages
from streamrl.config.training import AlgorithmConfig

PLAIN = AlgorithmConfig(norm_adv_by_std_in_grpo=False)
grpo = advantages.get("grpo")


def outcome(scores, lengths=None):
    """Rewards on the last token of rows of the given lengths, and their masks."""
    lengths = lengths or [2] * len(scores)
    rewards, mask = torch.zeros(len(scores), max(lengths)), torch.zeros(len(scores), max(lengths), dtype=torch.long)
    for i, (score, length) in enumerate(zip(scores, lengths, strict=True)):
        rewards[i, length - 1] = score
        mask[i, :length] = 1
    return rewards, mask


def test_grpo_golden_a1():
    rewards, mask = outcome([1, 0, 0.5])
    normed, returns = grpo(rewards, mask, index=["A"] * 3)
    assert torch.allclose(normed[:, 0], torch.tensor([0.999998, -0.999998, 0.0]), atol=1e-6) and torch.equal(normed, returns)
    assert torch.allclose(grpo(rewards, mask, index=["A"] * 3, config=PLAIN)[0][:, 1], torch.tensor([0.5, -0.5, 0.0]))


def test_grpo_of_the_worked_example_in_any_row_order():
    rewards, mask = outcome([1, 0, 0.5, 0, 0, 1], [3, 5, 4, 2, 4, 6])
    uids = np.array(["A"] * 3 + ["B"] * 3)
    expected = torch.tensor([0.999998, -0.999998, 0, -0.577349, -0.577349, 1.154699])
    for order in ([0, 1, 2, 3, 4, 5], [5, 0, 3, 1, 4, 2]):
        got, _ = grpo(rewards[order], mask[order], index=uids[order])
        assert torch.allclose(got, expected[order][:, None] * mask[order], atol=1e-5)
        assert not got[mask[order] == 0].any()


def test_a_nan_score_changes_no_sibling():
    rewards, mask = outcome([1, math.nan, 0, 0.5])
    got, _ = grpo(rewards, mask, index=["A"] * 4)
    assert torch.allclose(got[:, 0], torch.tensor([0.999998, 0.0, -0.999998, 0.0]), atol=1e-6)


@pytest.mark.parametrize(("score", "size"), [(1.0, 4), (0.1, 8), (0.7, 7), (1 / 3, 64)])
def test_equal_scores_give_exactly_zero(score, size):
    rewards, mask = outcome([score] * size)
    for config in (None, PLAIN):
        assert not grpo(rewards, mask, index=["A"] * size, config=config)[0].any()


def test_a_group_of_one_keeps_its_score():
    rewards, mask = outcome([0.7])
    assert grpo(rewards, mask, index=["A"])[0][0, 0].item() == pytest.approx(0.7 / (1 + 1e-6))
    assert grpo(rewards, mask, index=["A"], config=PLAIN)[0][0, 0].item() == pytest.approx(0.7)


def test_a_member_without_trainable_tokens_does_not_bias_its_siblings():
    rewards, mask = outcome([40, 1, 3])
    accept = torch.tensor([0, 1, 1])
    got, _ = grpo(rewards, mask, index=["A"] * 3, config=PLAIN, accept=accept)
    assert got[:, 0].tolist() == [0.0, -1.0, 1.0]
    mask[0] = 0
    assert grpo(rewards, mask, index=["A"] * 3, config=PLAIN)[0][:, 0].tolist() == [0.0, -1.0, 1.0]


def test_the_last_output_of_a_session_is_its_score_compared_as_numbers():
    rewards, mask = outcome([0, 1, 0, 5.0])
    columns = {"session_ids": [0, 0, 1, 0], "output_index": [9, 10, 0, 2]}
    got, _ = grpo(rewards, mask, index=["A"] * 4, config=PLAIN, **columns)
    assert got[:, 0].tolist() == [0.5, 0.5, -0.5, 0.5]


def test_a_session_whose_last_output_is_masked_out_still_has_its_score():
    rewards, mask = outcome([0, 1, 0])
    mask[1] = 0
    rewards[1] = 0
    got, _ = grpo(rewards, mask, index=["A"] * 3, config=PLAIN, session_ids=[0, 0, 1], output_index=[0, 1, 0])
    assert not got[1].any() and torch.isfinite(got).all()


def test_names_are_unique_and_listed():
    with pytest.raises(ValueError, match=r"\['gae', 'gdpo', .*'grpo'.*got 'GRPO'"):
        advantages.get("GRPO")
    with pytest.raises(ValueError, match="belongs to one"):
        advantages.register("grpo")(lambda rewards, mask: (rewards, rewards))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ABC"), st.floats(-5, 5, width=32)), min_size=1, max_size=12), st.randoms())
def test_row_order_never_matters(rows, random):
    rewards, mask = outcome([score for _, score in rows])
    uids = np.array([uid for uid, _ in rows])
    order = list(range(len(rows)))
    random.shuffle(order)
    straight, _ = grpo(rewards, mask, index=uids)
    assert torch.allclose(grpo(rewards[order], mask[order], index=uids[order])[0], straight[order], atol=1e-6)

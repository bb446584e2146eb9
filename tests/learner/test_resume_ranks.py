"""A learner that stops and goes on is the one that never stopped: bit by bit on the same number of ranks, within float32 sums on another."""

import random

import pytest
import torch

from streamrl.config.rollout import ModelConfig
from streamrl.config.training import ActorConfig, OptimConfig
from streamrl.learner.huggingface import saved_policy
from tests.learner import resume_ranks
from tests.learner.fakes import DictStore, make_rank, make_rows, save_tiny_llama
from tests.learner.two_ranks import one_step

STOPS = sorted(random.Random(5).sample(range(1, resume_ranks.STEPS), 5))
WEIGHT_TOLERANCE = 5e-5  # absolute: two ranks sum gradients in another order, and Adam moves a weight by up to lr = 1e-3 a step whatever its gradient


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """One rank first, alone; then two, which also go on from what the one has saved."""
    folder = tmp_path_factory.mktemp("resume")
    model = save_tiny_llama(folder / "model")

    def make():
        return make_rank(model, DictStore(), folder, actor=resume_ranks.ACTOR)

    straight = resume_ranks.split_at(make, [], folder / "one")
    split = resume_ranks.split_at(make, STOPS, folder / "one")
    rank = make()
    rank.load(str(folder / "one" / f"after-{STOPS[0]}"))
    torch.save(resume_ranks.state_of(rank), folder / "one.pt")
    rank.stop()
    return make, folder, straight, split, resume_ranks.run(model, folder, STOPS)


def test_one_rank_that_stops_five_times_ends_bit_equal(world):
    _, _, straight, split, _ = world
    assert len(STOPS) == 5 and resume_ranks.equal(split, straight)


def test_two_ranks_that_stop_five_times_end_bit_equal(world):
    assert [found["bit_equal"] for found in world[4]] == [True, True]


def test_what_is_written_beside_the_next_steps_of_two_ranks_is_what_was_staged(world):
    assert [found["beside"] for found in world[4]] == [True, True]


def gap(left, right):
    return max(float((left[name] - right[name]).abs().max()) for name in left if name.startswith("model."))


def test_two_ranks_go_on_where_one_stopped_and_one_where_two_did(world):
    make, folder, straight, _, found = world
    assert [rank["as_saved"] for rank in found] == [True, True]
    rank = make()
    rank.load(str(folder / "mixed"))
    assert resume_ranks.equal(resume_ranks.state_of(rank), torch.load(folder / "mixed.pt", weights_only=True))
    resume_ranks.learn(rank, range(STOPS[1], resume_ranks.STEPS))
    ends = [straight, torch.load(folder / "straight.pt", weights_only=True), resume_ranks.state_of(rank)]
    rank.stop()
    assert all(gap(end, straight) < WEIGHT_TOLERANCE for end in ends)


def test_what_two_ranks_saved_is_put_together_without_them(world):
    _, folder, _, _, _ = world
    expected = torch.load(folder / "mixed.pt", weights_only=True)
    policy = saved_policy(folder / "mixed" / "actor", torch.float32, ModelConfig(path="nowhere"))
    assert resume_ranks.equal({f"model.{name}": tensor for name, tensor in policy.items()}, {n: t for n, t in expected.items() if n.startswith("model.")})


def test_a_schedule_goes_on_where_it_stood(tmp_path):
    """Warm-up over 100 steps to 1e-3, saved after 10: the next rate is that of position 10, not of position 20."""
    actor = ActorConfig(ppo_mini_batch_size=2, optim=OptimConfig(lr=1e-3, lr_warmup_steps=100))
    model, store, rates = save_tiny_llama(tmp_path / "model"), DictStore(), []
    meta = make_rows(store, 2, 2)
    rank = make_rank(model, store, tmp_path, actor=actor)
    for step in range(12):
        if step == 10:
            resume_ranks.save(rank, tmp_path / "saved")
            rank.stop()
            rank = make_rank(model, store, tmp_path, actor=actor)
            rank.load(str(tmp_path / "saved"))
            assert rank.updates["actor"].progress.schedule_position == 10
        rates.append(one_step(rank, 1, store, meta, actor)[1].metrics["actor/lr"])
    rank.stop()
    assert rates == pytest.approx([1e-5 * position for position in range(12)]) and rates[10] == pytest.approx(1e-4)

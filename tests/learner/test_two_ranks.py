"""Two ranks over gloo, in one pair of processes under a 60 s limit, against one rank on the same rows."""

import pytest
import torch

from streamrl.learner.comm import Comm, Rendezvous
from tests.learner import two_ranks
from tests.learner.fakes import DictStore, make_rank, make_rows, save_tiny_llama
from tests.learner.reward_world import RowStore, reward_model, scores_of, unscored_rows

UNLIKE = {"actor/computed_tokens", "critic/computed_tokens"}  # depends on the split by its meaning


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    model = save_tiny_llama(folder / "model")
    return model, folder, two_ranks.run(model, folder)


def test_two_ranks_learn_what_one_rank_learns(pair, tmp_path):
    model, folder, (first, second) = pair
    assert first["update"] == second["update"] and sum(first["share_sizes"]) == 12
    store = DictStore()
    rank = make_rank(model, store, tmp_path, actor=two_ranks.ACTOR)
    _, report = two_ranks.one_step(rank, 1, store, make_rows(store, 4, 3, seed=1), two_ranks.ACTOR)
    applied, tokens, metrics = first["update"]
    assert (applied, tokens) == (report.applied, report.trained_tokens) == (4, tokens)
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "actor/pg_clipfrac"):
        assert metrics[name] == pytest.approx(report.metrics[name], rel=1e-3, abs=1e-5)
    both = torch.load(folder / "after-update-0.pt", weights_only=True)
    gap = sum((both[name] - value).abs().sum().item() for name, value in two_ranks.weights_of(rank).items()) / sum(value.numel() for value in both.values())
    assert gap < 1e-5
    rank.stop()


@pytest.mark.parametrize("family", two_ranks.FAMILIES)
def test_two_ranks_learn_what_one_rank_learns_in_every_family(pair, tmp_path, family):
    model, _, (first, second) = pair
    actor, algorithm = two_ranks.FAMILIES[family]
    store = DictStore()
    rank = make_rank(model, store, tmp_path, actor=actor, algorithm=algorithm, lora=two_ranks.LORA.get(family, {}), critic=two_ranks.CRITICS.get(family))
    for ours, theirs, others in zip(two_ranks.family_steps(rank, 1, store, actor), first[family], second[family], strict=True):
        assert theirs == others
        compared = {name: value for name, value in ours.items() if name not in UNLIKE and not name.startswith("perf/")}
        assert {name: theirs[name] for name in compared} == pytest.approx(compared, rel=2e-3, abs=2e-5)
    if rank.engine.adapters is not None:  # each rank hashed a part of the base, and each knows all of it
        assert first["base"] == second["base"] == rank.engine.adapters.record(torch.float32).base
    rank.stop()


def test_two_ranks_give_the_rewards_of_one_and_none_waits_for_a_rank_without_rows(pair):
    _, folder, results = pair
    (first, report, lonely), (second, *reports) = (result["reward model"] for result in results)
    assert not first.keys() & second.keys() and [report, lonely] == reports
    store, comm = RowStore(), Comm.join(0, 1, torch.device("cpu"), rendezvous="", held=Rendezvous("127.0.0.1", 1), timeout_s=30.0)
    alone = reward_model(str(folder / "classifier"), comm).score(store, store.add(unscored_rows()))
    assert first | second == pytest.approx(scores_of(store), abs=1e-5)
    assert report == pytest.approx(alone.metrics, abs=1e-5) and lonely == pytest.approx(alone.metrics, abs=1e-5)
    comm.leave()


def test_one_rank_continues_from_the_checkpoint_of_two(pair, tmp_path):
    model, folder, results = pair
    rank = make_rank(model, DictStore(), tmp_path, actor=two_ranks.ACTOR)
    rank.load(str(folder / "saved"))
    saved = torch.load(folder / "after-update-0.pt", weights_only=True)
    assert all(torch.equal(saved[name], value) for name, value in two_ranks.weights_of(rank).items())
    assert rank.updates["actor"].progress.schedule_position == results[0]["position"] == 1
    assert {int(state["step"]) for state in rank.engine.optimizer.state.values()} == {4}
    rank.stop()


def test_only_rank_0_writes_a_version(pair):
    _, _, (first, second) = pair
    assert first["manifest"] and second["manifest"] is None


def test_a_nan_on_one_rank_makes_both_skip_and_moves_nothing(pair):
    for result in pair[2]:
        assert result["poisoned"] == [0, 1, True]


def test_ranks_with_unlike_rows_run_the_same_number_of_passes(pair):
    for applied, tokens, seconds, _ in (result["uneven"] for result in pair[2]):
        assert (applied, tokens) == (1, 60) and seconds < 30

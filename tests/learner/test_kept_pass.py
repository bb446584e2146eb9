"""The update goes on from the pass that gave the old log-probs, where it may; elsewhere it computes its own, with the same result."""

import pytest
import torch

from streamrl.config.data import DataConfig
from streamrl.config.losses import POLICY_LOSSES
from streamrl.config.training import ActorConfig, OptimConfig, PolicyLossConfig
from streamrl.learner.plan import plan_update
from tests.learner.fakes import DictStore, make_rank, make_rows, save_tiny_llama
from tests.learner.two_ranks import STEP, one_step, weights_of

ACTOR = {"ppo_mini_batch_size": 4, "optim": OptimConfig(lr=1e-3)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make(model, tmp_path):
    """A rank over one batch of four groups, with a count of the policy's forward passes."""
    ranks = []

    def build(actor: ActorConfig, *, batch: int = 4, nan: bool = False, **changes):
        store = DictStore()
        meta = make_rows(store, 4, 3, seed=3, observations=True)
        if nan:
            store.rows[meta.keys[4]]["rm_scores"][:] = torch.nan
        rank = make_rank(model, store, tmp_path, actor=actor, data=DataConfig(train_files=["x"], train_batch_size=batch), **changes)
        passes: list[bool] = []
        rank.engine.module.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
        ranks.append(rank)
        return rank, store, meta, passes

    yield build
    for rank in ranks:
        rank.stop()


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("changes", [{}, {"entropy_coeff": 0.1}, {"shuffle": True}, {"loss_agg_mode": "seq-mean-token-mean"}])
def test_one_pass_scores_and_teaches_as_two_do(make, changes, nan):
    actor = ActorConfig(**ACTOR, **changes)
    found = []
    for batch in (4, 5):  # more prompts than a mini-batch: the step would have several updates, nothing is kept
        rank, store, meta, passes = make(actor, batch=batch, nan=nan)
        _, report = one_step(rank, 1, store, meta, actor)
        found.append((report.metrics, weights_of(rank), passes))
    (metrics, weights, passes), (expected, other, two) = found
    assert passes == [True] and two == [False, True]
    assert metrics["actor/ratio_max"] == 1.0  # exactly: both are the same numbers
    assert metrics["actor/pg_loss"] == pytest.approx(expected["actor/pg_loss"], rel=1e-5, abs=1e-7)
    assert metrics["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-5)
    assert all(torch.allclose(weights[name], other[name], atol=2e-5) for name in weights)


@pytest.mark.parametrize("changes", [{"ppo_micro_batch_size_per_gpu": 3}, {"ppo_epochs": 2}])
def test_nothing_is_kept_where_an_update_has_several_passes(make, changes):
    actor = ActorConfig(**ACTOR, **changes)
    rank, _, meta, passes = make(actor)
    rank.log_probs(meta)
    assert not any(passes)


@pytest.mark.parametrize("meanwhile", [lambda engine, rank: rank.probe(), lambda engine, rank: engine.reshard()], ids=["used", "moved"])
def test_a_pass_is_not_gone_on_from_after_the_policy_was_used_or_moved(make, meanwhile):
    actor = ActorConfig(**ACTOR)
    rank, _, meta, passes = make(actor)
    rank.log_probs(meta)
    rank.advantages(meta)
    meanwhile(rank.engine, rank)
    del passes[:]
    rank.update(plan_update(meta, 1, actor, **STEP)[0])
    assert passes == [True]


def test_a_pass_finds_tokens_in_any_order_of_rows_and_refuses_what_it_did_not_score(make):
    rank, _, meta, _ = make(ActorConfig(**ACTOR))
    few = meta.select_keys(meta.keys[:6])
    rank.log_probs(few)
    kept = rank.engine._kept

    def batch(places: list[int]):
        return rank._rows(meta, ["response_mask"]).micro_batch(places, "response_mask", rank.engine.layout)

    assert kept.places_of(batch([0, 6])) is None
    turned = batch([4, 0, 2])
    assert torch.allclose(kept.scored_at(kept.places_of(turned)).log_probs, rank.engine.score(turned).log_probs, atol=1e-6)


@pytest.mark.parametrize("loss", [name for name, traits in POLICY_LOSSES.items() if traits.scales_advantage])
@pytest.mark.parametrize("same", [4, 3, 0])
def test_groups_whose_answers_score_alike_cost_their_scoring_pass_only(make, loss, same):
    """Of four groups ``same`` have one score each. Loss, gradient and weights are those of computing every row."""
    actor = ActorConfig(**ACTOR, policy_loss=PolicyLossConfig(loss_mode=loss))
    found = []
    for batch in (4, 5):  # with 5 a step may have several updates, and every row is computed
        rank, store, meta, passes = make(actor, batch=batch)
        for i, key in enumerate(meta.keys):
            store.rows[key]["rm_scores"][-1] = float(i // 3 >= same and i % 3 == 0)
        sizes: list[int] = []
        rank.engine.module.register_forward_pre_hook(lambda _, args, sizes=sizes: sizes.append(args[0].ids.numel()))
        _, report = one_step(rank, 1, store, meta, actor)
        found.append((report, weights_of(rank), passes, sizes))
    (report, weights, passes, sizes), (expected, other, _, full) = found
    assert passes == ([True] if same == 0 else [True, True])
    assert same == 0 or sizes[-1] < full[-1] / 2
    assert (report.applied, report.trained_tokens) == (expected.applied, expected.trained_tokens)
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "actor/ratio_max", "actor/pg_clipfrac"):
        assert report.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-5, abs=2e-6), name
    assert all(torch.allclose(weights[name], other[name], atol=2e-5) for name in weights)


@pytest.mark.parametrize("changes", [{"entropy_coeff": 0.1}, {"policy_loss": PolicyLossConfig(loss_mode="dro", dro_beta=0.1)}])
def test_rows_that_a_bonus_or_another_loss_moves_are_computed_without_an_advantage_too(make, changes):
    actor = ActorConfig(**ACTOR, **changes)
    rank, store, meta, passes = make(actor)
    for key in meta.keys:
        store.rows[key]["rm_scores"][:] = 0.0
    one_step(rank, 1, store, meta, actor)
    assert passes == [True]

"""A policy loss of user code is taken when it keeps the contract, and named with the rule that it breaks when it does not."""

import pytest
import torch

from streamrl.algorithms import losses
from streamrl.config.training import ActorConfig, PolicyLossConfig
from tests.learner.fakes import DictStore, make_rank, make_rows, save_tiny_llama
from tests.learner.two_ranks import one_step

HERE = "tests.algorithms.custom_losses"
SEQUENCES = "seq-mean-token-mean"


def call(name: str, row_weights=None):
    old = torch.zeros(2, 3)
    new = torch.full((2, 3), -0.1, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    keywords = {"loss_agg_mode": "token-mean", "config": ActorConfig(), "rollout_is_weights": None, "dp_size": 1, "batch_num_tokens": 3.0}
    keywords |= {"global_batch_size": 2.0, "loss_scale_factor": None} | ({} if row_weights is None else {"row_weights": torch.tensor(row_weights)})
    return losses.get(f"{HERE}:{name}")(old, new, torch.ones(2, 3), mask, **keywords)


def test_plain_numbers_are_metrics():
    loss, metrics = call("plain_numbers")
    assert loss.item() == pytest.approx(0.1)
    assert {name: value.item() for name, value in metrics.items()} == {"mine": 0.25, "count": 3.0}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("of_each_row", r"returns one number, got a tensor \(2,\) from .*of_each_row"),
        ("detached", "depends on log_probs, got one without a gradient from .*detached"),
        ("no_pair", "returns .scalar tensor, metrics., got Tensor from .*no_pair"),
        ("vector_metric", r"a metric of a policy loss is one number, got mine = \(2, 3\) from .*vector_metric"),
        ("few_keywords", "takes the keywords .*, got .*few_keywords' without loss_agg_mode, rollout_is_weights, dp_size"),
    ],
)
def test_a_broken_rule_is_named_with_the_loss(name, said):
    with pytest.raises(ValueError, match=said):
        call(name)


def test_row_weights_may_be_left_out_while_every_session_has_one_row():
    assert call("without_row_weights", [1.0, 1.0])[0].item() == pytest.approx(0.1)
    with pytest.raises(ValueError, match=r"several rows counts once .*without_row_weights', which takes none; add row_weights"):
        call("without_row_weights", [0.5, 0.5])


@pytest.mark.parametrize(("name", "mode"), [("plain_numbers", None), ("without_row_weights", SEQUENCES)])
def test_a_rank_trains_with_it(name, mode, tmp_path):
    store = DictStore()
    actor = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=f"{HERE}:{name}"), ppo_micro_batch_size_per_gpu=2, loss_agg_mode=mode)
    rank = make_rank(save_tiny_llama(tmp_path / "model"), store, tmp_path, actor=actor)
    report = one_step(rank, 1, store, make_rows(store, 2, 2), actor)[1]
    assert report.applied == 1 and report.metrics.get("actor/mine", 0.5) == 0.5  # a number adds up over two micro-batches
    rank.stop()

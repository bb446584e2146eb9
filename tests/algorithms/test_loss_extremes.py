"""What stands in masked slots reaches neither loss, gradient nor metrics, and no input that can occur makes a loss infinite."""

import math

import pytest
import torch

from streamrl.algorithms import losses
from streamrl.config.losses import POLICY_LOSSES
from tests.algorithms.loss_cases import LOSSES, PAIRS, config_of, make_batch, run

FILLERS = [0.0, 1.0, -1.0, math.nan, math.inf, -math.inf]


def call(name, old, new, advantages, mask, **options):
    """(loss, gradient, metrics)"""
    new = new.clone().requires_grad_()
    loss, metrics = losses.get(name)(old, new, advantages, mask, config=config_of(name), **options)
    loss.backward()
    return loss.detach(), new.grad, metrics


@pytest.mark.parametrize(("name", "mode"), PAIRS)
def test_fillers_of_masked_slots_never_show(name, mode):
    plain = make_batch(2)
    value, gradient, metrics = run(name, mode, plain, [[0, 1], [2], [3, 4, 5]])
    for filler in FILLERS:
        batch = make_batch(2)
        hidden = batch.mask == 0
        for column, other in ((batch.old, filler), (batch.new, -filler), (batch.advantages, filler), (batch.weights, abs(filler))):
            column[hidden] = other
        found, found_gradient, found_metrics = run(name, mode, batch, [[0, 1], [2], [3, 4, 5]])
        assert torch.equal(value, found) and torch.equal(gradient, found_gradient) and metrics == found_metrics
        assert not found_gradient[hidden].any()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", [1e4, 90.0, 21.0, 10.5])
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("advantage", [-3.0, 0.0, 3.0])
def test_far_log_ratios_stay_finite(name, size, sign, advantage):
    far = torch.full((2, 3), -size)
    old, new = (far, torch.zeros(2, 3)) if sign > 0 else (torch.zeros(2, 3), far)
    for weights in (None, torch.zeros(2, 3), torch.full((2, 3), 1e6)):
        loss, gradient, metrics = call(name, old, new, torch.full((2, 3), advantage), torch.ones(2, 3), rollout_is_weights=weights)
        assert torch.isfinite(loss) and torch.isfinite(gradient).all() and all(torch.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shape", [(3, 4), (1, 1), (2, 0), (0, 3), (0, 0)])
def test_nothing_to_train_is_a_loss_of_zero(name, shape):
    filler = torch.full(shape, math.nan)
    loss, gradient, metrics = call(name, filler, filler, filler, torch.zeros(shape))
    assert loss.item() == 0 and not gradient.any() and {value.item() for value in metrics.values()} == {0.0}


@pytest.mark.parametrize("name", LOSSES)
def test_one_token_is_a_batch(name):
    loss, gradient, _ = call(name, torch.tensor([[-1.0]]), torch.tensor([[-0.9]]), torch.tensor([[0.5]]), torch.ones(1, 1))
    assert torch.isfinite(loss) and torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", LOSSES)
def test_every_registered_loss_runs_through_one_dispatcher(name):
    loss, gradient, metrics = call(name, torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -2.0]]), torch.tensor([[0.5, -0.5]]), torch.tensor([[1, 1]]))
    assert torch.isfinite(loss) and torch.isfinite(gradient).all()
    assert set(metrics) == {"pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "ratio_max", "loss_tokens", "rejected_tokens"}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.uint8])
def test_a_mask_is_bool_or_zero_and_one(name, dtype):
    inputs = torch.tensor([[-1.0, -2.0]])
    assert torch.isfinite(call(name, inputs, inputs, inputs, torch.tensor([[1, 0]]).to(dtype))[0])
    for wrong in (torch.tensor([[0.5, -0.5]]), torch.tensor([[math.nan, 1.0]]), torch.tensor([[2, 1]])):
        with pytest.raises(ValueError, match="loss_mask holds 0 and 1"):
            call(name, inputs, inputs, inputs, wrong)
    with pytest.raises(ValueError, match="of one shape"):
        call(name, inputs, inputs, torch.zeros(1, 3), torch.ones(1, 2))
    with pytest.raises(TypeError):
        losses.get(name)(inputs, inputs, inputs, torch.ones(1, 2), "token-mean")


@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_inputs_stay_finite(name):
    inputs = [column.to(torch.bfloat16) for column in (torch.full((1, 3), -9.0), torch.full((1, 3), -0.5), torch.ones(1, 3))]
    assert torch.isfinite(call(name, *inputs, torch.ones(1, 3))[0])


def test_the_table_of_losses_is_the_registry():
    ours = [name for name in losses.names() if losses.get(name).__module__.startswith("streamrl.")]  # other tests register losses of their own
    assert ours == sorted(POLICY_LOSSES)
    for name in ours:
        assert losses.get(name).batch_dependent == POLICY_LOSSES[name].batch_dependent == (losses.get(name).select is not None)
        assert losses.get(name).__name__ == name and losses.get(name).__doc__


def test_a_selection_is_refused_where_none_is_made():
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="selects no tokens"):
        losses.get("vanilla")(one, one, one, one, selected=one.bool())


@pytest.mark.parametrize("kind", ["value", "policy"])
def test_globals_are_needed_over_several_ranks(kind):
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="dp_size > 1 needs batch_num_tokens"):
        losses.value_loss(one, one, one, one, dp_size=2) if kind == "value" else losses.get("vanilla")(one, one, one, one, dp_size=2)


def test_value_loss_adds_up_over_splits_and_hides_masked_slots():
    batch = make_batch(4)
    options = {"batch_num_tokens": float(batch.mask.sum()), "dp_size": 2}
    whole, share = losses.value_loss(batch.new, batch.advantages, batch.old, batch.mask, **options)
    parts = [losses.value_loss(*(x[rows] for x in (batch.new, batch.advantages, batch.old, batch.mask)), **options) for rows in ([5, 1], [0, 2, 3], [4])]
    assert torch.allclose(whole, sum(loss for loss, _ in parts)) and torch.allclose(share["vf_clipfrac"], sum(found["vf_clipfrac"] for _, found in parts))
    hidden = batch.new.masked_fill(batch.mask == 0, math.nan).requires_grad_()
    loss, _ = losses.value_loss(hidden, batch.advantages.masked_fill(batch.mask == 0, math.inf), batch.old, batch.mask)
    loss.backward()
    assert torch.allclose(loss, whole / 2) and not hidden.grad[batch.mask == 0].any() and torch.isfinite(hidden.grad).all()

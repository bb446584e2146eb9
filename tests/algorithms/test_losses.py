import math

import pytest
import torch

from streamrl.algorithms import advantages, losses
from streamrl.config.training import ActorConfig

vanilla = losses.get("vanilla")
LOSS = torch.tensor([[1.0, 2, 9], [3, 9, 9]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@pytest.mark.parametrize(("mode", "value"), list(zip(MODES, [2, 6, 3, 2.25, 1.0], strict=True)))
def test_aggregation_golden_a14(mode, value):
    assert losses.agg_loss(LOSS, MASK, mode, loss_scale_factor=3).item() == pytest.approx(value)


def test_aggregation_with_globals():
    assert losses.agg_loss(LOSS, MASK, "token-mean", dp_size=2, batch_num_tokens=6).item() == pytest.approx(2.0)
    assert losses.agg_loss(LOSS, MASK, "seq-mean-token-sum-norm", loss_scale_factor=100).item() == pytest.approx(0.03)
    loss, mask = torch.cat([LOSS, LOSS[:1]]), torch.cat([MASK, torch.zeros_like(MASK[:1])])
    assert losses.agg_loss(loss, mask, "seq-mean-token-sum").item() == pytest.approx(3.0)
    assert losses.agg_loss(loss, mask, "seq-mean-token-sum", global_batch_size=3).item() == pytest.approx(2.0)
    assert losses.agg_loss(loss, mask, "seq-mean-token-mean", global_batch_size=2).item() == pytest.approx(2.25)


@pytest.mark.parametrize("mode", MODES)
def test_masked_nan_reaches_neither_value_nor_gradient(mode):
    loss = torch.tensor([[1.0, 3.0, math.nan], [math.inf, -math.inf, math.nan]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    value = losses.agg_loss(loss, mask, mode, loss_scale_factor=1.0)
    value.backward()
    assert value.item() == pytest.approx({"token-mean": 2, "seq-mean-token-mean": 2}.get(mode, 4))
    assert loss.grad[mask == 0].tolist() == [0.0] * 4


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_mask_is_zero_and_a_bad_call_is_refused(mode):
    assert losses.agg_loss(LOSS, torch.zeros_like(MASK), mode, loss_scale_factor=1.0).item() == 0.0
    if mode != "token-sum":
        with pytest.raises(ValueError, match="dp_size > 1 needs"):
            losses.agg_loss(LOSS, MASK, mode, dp_size=2, loss_scale_factor=1.0)


def test_unknown_modes_and_missing_constants_are_refused():
    with pytest.raises(ValueError, match="loss_agg_mode must be one of"):
        losses.agg_loss(LOSS, MASK, "mean")
    with pytest.raises(ValueError, match="loss_scale_factor"):
        losses.agg_loss(LOSS, MASK, "seq-mean-token-sum-norm")


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"), [(2, 1, -1.2), (0.5, 1, -0.5), (2, -1, 2.0), (5, -1, 3.0), (0.5, -1, 0.8), (50, -1, 3.0), (50, 1, -1.2)]
)
def test_vanilla_golden_a11(ratio, advantage, expected):
    one = torch.ones(1, 1)
    loss, metrics = vanilla(one * 0, one * math.log(ratio), one * advantage, one)
    assert loss.item() == pytest.approx(expected, abs=1e-5)
    assert metrics["ppo_kl"].item() == pytest.approx(-math.log(ratio), abs=1e-5)


def test_clip_sides_default_to_clip_ratio_and_the_dual_constant_is_checked():
    one = torch.ones(1, 1)
    assert vanilla(one * 0, one, one, one, config=ActorConfig(clip_ratio=0.5))[0].item() == pytest.approx(-1.5)
    assert vanilla(one * 0, one, one, one, config=ActorConfig(clip_ratio=0.5, clip_ratio_high=0.1))[0].item() == pytest.approx(-1.1)
    with pytest.raises(ValueError, match="clip_ratio_c"):
        vanilla(one, one, one, one, config=ActorConfig(clip_ratio_c=1.0))


@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradient_do_not_depend_on_the_split(mode):
    torch.manual_seed(0)
    old, new, adv = (torch.randn(6, 5) for _ in range(3))
    mask = (torch.rand(6, 5) > 0.4).long()
    mask[2] = 0
    weights = torch.rand(6, 5)
    denominators = {"batch_num_tokens": float(mask.sum()), "global_batch_size": float(mask.any(1).sum()), "loss_scale_factor": 7.0}

    def run(parts, dp):
        log_probs = new.clone().requires_grad_()
        total = torch.zeros(())
        for rows in parts:
            loss, _ = vanilla(
                old[rows], log_probs[rows], adv[rows], mask[rows], loss_agg_mode=mode, rollout_is_weights=weights[rows], dp_size=dp, **denominators
            )
            total = total + loss / dp
        total.backward()
        return total.detach(), log_probs.grad

    value, gradient = run([list(range(6))], 1)
    for parts, dp in (([[0], [1, 2], [3, 4, 5]], 1), ([[5, 3], [2], [0, 4, 1]], 2), ([[i] for i in range(6)], 4)):
        other, other_gradient = run(parts, dp)
        assert torch.allclose(value, other, rtol=1e-5) and torch.allclose(gradient, other_gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("mode", "expected"), [("token-mean", -0.061004), ("seq-mean-token-mean", 0.0), ("seq-mean-token-sum", -0.244017)])
def test_worked_example_w1(mode, expected):
    lengths, scores = [3, 5, 4, 2, 4, 6], [1, 0, 0.5, 0, 0, 1]
    mask = (torch.arange(6) < torch.tensor(lengths)[:, None]).long()
    rewards = torch.zeros(6, 6)
    for i, (length, score) in enumerate(zip(lengths, scores, strict=True)):
        rewards[i, length - 1] = score
    adv, _ = advantages.get("grpo")(rewards, mask, index=["A"] * 3 + ["B"] * 3)
    log_probs = torch.randn(6, 6)
    loss, metrics = vanilla(log_probs, log_probs, adv, mask, loss_agg_mode=mode)
    assert loss.item() == pytest.approx(expected, abs=1e-5)
    assert metrics["ratio_max"].item() == 1.0 and metrics["loss_tokens"].item() == 24


def test_weights_of_another_shape_and_no_rank_are_refused():
    batch, mask = torch.zeros(2, 3), torch.ones(2, 3)
    for name in ("vanilla", "geo_mean"):
        with pytest.raises(ValueError, match=r"one shape, got loss_mask \(2, 3\) and \{'rollout_is_weights': \(2, 1\)\}"):
            losses.get(name)(batch, batch, batch, mask, rollout_is_weights=torch.ones(2, 1))
        for mode in MODES if name == "vanilla" else [None]:
            with pytest.raises(ValueError, match="dp_size counts ranks, at least 1, got 0"):
                losses.get(name)(batch, batch, batch, mask, loss_agg_mode=mode, dp_size=0, loss_scale_factor=4.0)


@pytest.mark.parametrize("pi", [-math.inf, math.inf])
def test_gspo_of_an_infinite_log_prob_is_a_bounded_ratio_and_no_nan(pi):
    new = torch.tensor([[pi, -1.0]], requires_grad=True)
    loss, _ = losses.get("gspo")(torch.full((1, 2), -1.0), new, torch.ones(1, 2), torch.ones(1, 2))
    loss.backward()
    assert loss.item() == pytest.approx(0.0 if pi < 0 else -1.2) and torch.isfinite(new.grad).all()

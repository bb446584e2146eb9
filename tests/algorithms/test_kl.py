import math

import pytest
import torch

from streamrl.algorithms import kl
from streamrl.algorithms.kl_control import AdaptiveKL, FixedKL, kl_controller
from streamrl.config.losses import AGG_MODES
from streamrl.config.training import KLControl

KINDS = ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+"]


def gradient(kind, pi=-1.0, ref=-1.5):
    new = torch.tensor([[pi]], requires_grad=True)
    kl.kl_penalty(new, torch.tensor([[ref]]), kind).sum().backward()
    return new.grad.item()


@pytest.mark.parametrize(("kind", "value"), [("k1", 0.5), ("kl", 0.5), ("abs", 0.5), ("k2", 0.125), ("mse", 0.125), ("k3", 0.106531), ("low_var_kl", 0.106531)])
def test_values_golden_a9_and_a_plus_changes_none(kind, value):
    pi, ref = torch.tensor([[-1.0]]), torch.tensor([[-1.5]])
    assert kl.kl_penalty(pi, ref, kind).item() == pytest.approx(value, abs=1e-5)
    if kind not in ("k2", "mse"):
        assert kl.kl_penalty(pi, ref, f"{kind}+").item() == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize(("difference", "value"), [(-0.5, 0.1487), (0.5, 0.1065), (0.0, 0.0)])
def test_k3_of_the_reference_minus_the_policy(difference, value):
    assert kl.kl_penalty(torch.tensor([[difference]]), torch.zeros(1, 1), "k3").item() == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize(("kind", "slope"), [("k1", 1.0), ("abs", 1.0), ("k2", 0.5), ("k3", 1 - math.exp(-0.5)), ("k1+", 0.5), ("abs+", 0.5), ("k3+", 0.5)])
def test_gradient_of_one_token(kind, slope):
    assert gradient(kind) == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize(("kind", "expected"), [("k1", 0.0), ("k3", 0.300), ("k2", 0.2218), ("k1+", 0.2218), ("abs+", 0.2218), ("k3+", 0.2218)])
def test_expected_gradient_as_a_loss_of_two_actions(kind, expected):
    logit = torch.tensor(math.log(4.0), dtype=torch.float64, requires_grad=True)  # probabilities 0.8 and 0.2
    log_probs = torch.stack([torch.nn.functional.logsigmoid(logit), torch.nn.functional.logsigmoid(-logit)])
    penalty = kl.kl_penalty(log_probs, torch.full((2,), math.log(0.5), dtype=torch.float64), kind)
    (log_probs.exp().detach() * penalty).sum().backward()
    assert logit.grad.item() == pytest.approx(expected, abs=5e-5)


def test_the_true_gradient_is_that_of_the_divergence():
    logit = torch.tensor(math.log(4.0), dtype=torch.float64, requires_grad=True)
    p = torch.sigmoid(logit)
    divergence = p * (p / 0.5).log() + (1 - p) * ((1 - p) / 0.5).log()
    divergence.backward()
    assert divergence.item() == pytest.approx(0.1927, abs=1e-4) and logit.grad.item() == pytest.approx(0.2218, abs=5e-5)


@pytest.mark.parametrize(
    ("kind", "error"), [("k2+", ValueError), ("mse+", ValueError), ("full", NotImplementedError), ("full+", NotImplementedError), ("K1", NotImplementedError)]
)
def test_kinds_without_a_meaning_are_refused(kind, error):
    with pytest.raises(error, match="got"):
        kl.kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_far_and_masked_tokens_have_finite_values_and_gradients(kind):
    pi = torch.tensor([[-90.0, -20.0, -math.inf, math.nan, -1.0]], requires_grad=True)
    ref, mask = torch.tensor([[0.0, 0.0, -1.0, -math.inf, -1e4]]), torch.tensor([[1, 1, 0, 0, 1]])
    loss, metrics = kl.kl_loss(pi, ref, mask, kind, "token-mean")
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(pi.grad).all() and pi.grad[0, 2:4].tolist() == [0.0, 0.0]
    assert metrics["kl_clamped_tokens"].item() == (3 if "3" in kind or "low_var" in kind else 0)


@pytest.mark.parametrize("mode", AGG_MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_adds_up_over_micro_batches_and_ranks(kind, mode):
    g = torch.Generator().manual_seed(0)
    pi, ref = (-3 * torch.rand(6, 4, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(6, 4, generator=g) > 0.4
    mask[1] = False
    options = {"batch_num_tokens": float(mask.sum()), "global_batch_size": float(mask.any(1).sum()), "loss_scale_factor": 4.0}

    def run(parts, dp):
        new, total, means = pi.clone().requires_grad_(), 0.0, 0.0
        for rows in parts:
            loss, metrics = kl.kl_loss(new[rows], ref[rows], mask[rows], kind, mode, dp_size=dp, **options)
            total, means = total + loss / dp, means + metrics["kl_mean"]
        total.backward()
        return torch.cat([total.detach()[None], means[None], new.grad.flatten()])

    for parts, dp in (([[5, 0], [1], [2, 4, 3]], 2), ([[i] for i in range(6)], 4)):
        assert torch.allclose(run([list(range(6))], 1), run(parts, dp), rtol=1e-9, atol=1e-12)


def test_kl_in_the_reward_reads_trained_tokens_only():
    scores, mask = torch.tensor([[0.0, 0.0, 1.0], [0.0, 2.0, 0.0], [0.0, 0.0, 5.0]]), torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]])
    old = torch.tensor([[-1.0, -1.0, math.nan], [math.inf, -2.0, 0.0], [math.nan] * 3])
    ref = torch.tensor([[-1.5, -2.0, 0.0], [0.0, -1.0, -math.inf], [0.0] * 3])
    rewards, mean, rows = kl.kl_in_reward(scores, old, ref, mask, beta=0.1)
    assert torch.allclose(rewards, torch.tensor([[-0.05, -0.1, 1.0], [0.0, 2.1, 0.0], [0.0, 0.0, 5.0]]))
    assert mean == pytest.approx((0.75 - 1.0) / 2) and rows == 2
    assert kl.kl_in_reward(scores, old, ref, mask * 0, beta=0.1)[1:] == (0.0, 0)


def test_the_adaptive_controller_golden_a10_and_its_bounds():
    controller = kl_controller(KLControl(type="adaptive", kl_coef=0.001, target_kl=0.1, horizon=10000))
    controller.update(0.3, 256)
    assert controller.beta == pytest.approx(0.00100512)
    controller = AdaptiveKL(1.0)
    controller.update(0.0, 10000)
    assert controller.beta == pytest.approx(0.8)
    controller.update(0.1, 10000)
    assert controller.beta == pytest.approx(0.8)
    with pytest.raises(ValueError, match="finite"):
        controller.update(math.nan, 1)
    with pytest.raises(ValueError, match="horizon"):
        AdaptiveKL(1.0, horizon=0)


def test_the_fixed_controller_never_moves_and_a_state_is_one_number():
    controller = kl_controller(KLControl(kl_coef=0.02))
    controller.update(5.0, 1000)
    assert controller == FixedKL(0.02)
    moved = AdaptiveKL(0.5)
    moved.update(1.0, 100)
    resumed = AdaptiveKL(moved.beta)
    for each in (moved, resumed):
        each.update(0.05, 64)
    assert moved == resumed


def test_a_reference_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"have one shape, got \(2, 3\) and \(2, 1\)"):
        kl.kl_penalty(torch.zeros(2, 3), torch.zeros(2, 1), "k1")

"""Golden values and closed forms of each policy loss, and equality with the same formula written bare."""

import math

import pytest
import torch

from streamrl.algorithms import losses
from streamrl.config.training import ActorConfig, PolicyLossConfig, RolloutCorrection
from tests.algorithms.bare_losses import BARE
from tests.algorithms.loss_cases import LOSSES, make_batch

ONE = torch.ones(1, 1)


def actor(name, **keys):
    own = {key: keys.pop(key) for key in list(keys) if key in PolicyLossConfig.__struct_fields__}
    return ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name, **({"dro_beta": 0.5} if name == "dro" else {}) | own), **keys)


def single(name, *, pi, old, advantage, config=None, weight=None):
    """Loss, gradient and metrics of one token."""
    new = (ONE * pi).requires_grad_()
    weights = None if weight is None else ONE * weight
    loss, metrics = losses.get(name)(ONE * old, new, ONE * advantage, ONE, config=config or actor(name), rollout_is_weights=weights)
    loss.backward()
    return loss.item(), new.grad.item(), metrics


@pytest.mark.parametrize(
    ("name", "pi", "old", "advantage", "expected"),
    [
        ("cispo", -1, -1 - math.log(2), 1, 1.2),
        ("gpg", -1, -1.5, 1, 1.0),
        ("dro", -1, -1.5, 1, 1.0625),
        ("sapo", -1, -1 - math.log(2), 1, -2.924234),
        ("vanilla", -1, -1 - math.log(2), 1, -1.2),
        ("gspo", -1, -1 - math.log(2), 1, -1.2),
        ("gspo", -1, -1 - math.log(2), -1, 2.0),
        ("geo_mean", -1, -1.5, 1, -math.exp(0.2)),
        ("geo_mean", -1, -1.5, -1, math.exp(0.5)),
        ("geo_mean", -1.5, -1, -1, math.exp(-0.2)),
        ("kl_cov", -1, -1.5, 1, -math.exp(0.5) + 0.05),
        ("clip_cov", -1, -1.5, 1, -1.2),
        ("bypass_mode", -1, -1 - math.log(2), 1, -1.2),
    ],
)
def test_golden_value_of_one_token(name, pi, old, advantage, expected):
    assert single(name, pi=pi, old=old, advantage=advantage)[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "pi", "old", "advantage", "gradient"),
    [
        ("cispo", -1, -1 - math.log(2), 1, -1.2),
        ("gpg", -1, -1.5, 2, -2.0),
        ("dro", -1, -1.5, 1, -1 + 0.5 * 0.5),
        ("sapo", -1, -1, 1, -1.0),  # at rho = 1 the plain policy gradient
        ("sapo", -1, -1, -1, 1.0),
        ("vanilla", -1, -1 - math.log(2), 1, 0.0),
        ("vanilla", -1, -1 - math.log(2), -1, 2.0),
        ("vanilla", -1, -1 - math.log(5), -1, 0.0),
        ("gspo", -1, -1.1, 1, -math.exp(0.1)),
        ("geo_mean", -1, -1.1, 1, -math.exp(0.1)),
    ],
)
def test_gradient_of_one_token(name, pi, old, advantage, gradient):
    assert single(name, pi=pi, old=old, advantage=advantage)[1] == pytest.approx(gradient, abs=1e-5)


@pytest.mark.parametrize(("advantage", "dual", "expected"), [(-1, 3.0, 3.0), (-1, 1e9, 50.0), (1, 3.0, -1.2)])
def test_the_dual_clip_bounds_negative_advantages_only(advantage, dual, expected):
    assert single("vanilla", pi=-1, old=-1 - math.log(50), advantage=advantage, config=actor("vanilla", clip_ratio_c=dual))[0] == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.parametrize(
    ("name", "p", "q", "advantage", "valid"),
    [
        ("dppo_tv", 0.5, 0.2, 1, False),
        ("dppo_tv", 0.5, 0.2, -1, True),
        ("dppo_tv", 0.39, 0.2, 1, True),
        ("dppo_tv", 0.2, 0.5, -1, False),
        ("dppo_kl", 0.5, 0.2, 1, True),  # binary KL 0.193 is within 0.2
        ("dppo_kl", 0.6, 0.2, 1, False),
        ("dppo_kl", 0.6, 0.2, -1, True),
        ("dppo_kl", 0.01, 0.4, -1, False),
        ("dppo_kl", 0.01, 0.4, 1, True),
    ],
)
def test_dppo_trains_a_token_only_inside_its_region(name, p, q, advantage, valid):
    loss, gradient, metrics = single(name, pi=math.log(p), old=math.log(q), advantage=advantage)
    assert loss == pytest.approx(-advantage * p / q * math.log(p) if valid else 0.0, rel=1e-5)
    assert gradient == pytest.approx(-advantage * p / q if valid else 0.0, rel=1e-5) and metrics["pg_clipfrac"].item() == float(not valid)


def test_dppo_truncates_at_its_own_constant():
    values = {c: single("dppo_tv", pi=-1, old=-5, advantage=-1, config=actor("dppo_tv", dppo_truncation=c))[1] for c in (20.0, 3.0, 100.0)}
    assert values == pytest.approx({20.0: 20.0, 3.0: 3.0, 100.0: math.exp(4)}, rel=1e-5)


def test_gspo_gives_every_token_the_ratio_of_its_sequence():
    old, new, mask = torch.tensor([[-1.0, -1.0, 7.0]]), torch.tensor([[-0.7, -0.9, -9.0]], requires_grad=True), torch.tensor([[1, 1, 0]])
    loss, _ = losses.get("gspo")(old, new, torch.ones(1, 3), mask, config=actor("gspo", clip_ratio_high=0.5))
    loss.backward()
    assert loss.item() == pytest.approx(-math.exp(0.2), rel=1e-5)
    assert new.grad.tolist()[0] == pytest.approx([-math.exp(0.2) / 2, -math.exp(0.2) / 2, 0.0], rel=1e-5)


def test_gspo_follows_an_explicit_mode_and_sapo_and_geo_mean_have_one():
    batch = make_batch(0, 2)
    inputs = (batch.old, batch.new, batch.advantages, batch.mask)
    values = {
        name: [losses.get(name)(*inputs, loss_agg_mode=mode)[0].item() for mode in (None, "seq-mean-token-mean", "token-sum")]
        for name in LOSSES
        if name != "dro"
    }
    for name in ("gspo", "sapo", "geo_mean"):
        assert values[name][0] == values[name][1]
    assert values["gspo"][2] != values["gspo"][1] and len(set(values["sapo"])) == 1 and len(set(values["geo_mean"])) == 1


def test_geo_mean_weighs_a_row_by_the_geometric_mean_of_its_weights():
    config = actor("geo_mean")
    args = (torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2))
    assert losses.get("geo_mean")(*args, config=config, rollout_is_weights=torch.tensor([[4.0, 0.25]]))[0].item() == pytest.approx(-1.0)
    assert losses.get("geo_mean")(*args, config=config, rollout_is_weights=torch.tensor([[2.0, 8.0]]))[0].item() == pytest.approx(-4.0, rel=1e-5)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("geo_mean", "bypass_mode")])
def test_importance_weights_multiply_loss_and_gradient(name):
    plain, weighted = (single(name, pi=-1.0, old=-1.1, advantage=0.7, weight=weight) for weight in (None, 0.25))
    assert weighted[0] == pytest.approx(plain[0] / 4) and weighted[1] == pytest.approx(plain[1] / 4)
    assert plain[2]["rejected_tokens"].item() == 0 and single(name, pi=-1.0, old=-1.1, advantage=0.7, weight=0.0)[2]["rejected_tokens"].item() == 1


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(5))
def test_each_loss_equals_its_formula_written_bare(name, seed):
    batch = make_batch(seed, 2, 40, torch.float32)
    batch = batch.rows([0, 1, 0, 1])
    batch.new = batch.old + torch.randn(4, 40, generator=torch.Generator().manual_seed(seed))
    batch.advantages = torch.randn(4, 40, generator=torch.Generator().manual_seed(100 + seed))
    ours, theirs = (batch.new.clone().requires_grad_() for _ in range(2))
    torch.manual_seed(seed)
    loss, metrics = losses.get(name)(batch.old, ours, batch.advantages, batch.mask, config=actor(name), rollout_is_weights=batch.weights)
    torch.manual_seed(seed)
    bare = BARE[name](batch.old, theirs, batch.advantages, batch.mask.float(), batch.weights)
    loss.backward()
    bare.backward()
    assert torch.allclose(loss, bare, rtol=1e-5) and torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)
    kept = batch.mask.bool()
    log_ratio = (batch.new - batch.old)[kept]
    assert metrics["ppo_kl"].item() == pytest.approx(-log_ratio.mean().item(), abs=1e-5)
    assert metrics["ratio_max"].item() == pytest.approx(log_ratio.max().exp().item(), rel=1e-5) and metrics["loss_tokens"].item() == kept.sum()
    assert all(value.dim() == 0 and not value.requires_grad for value in metrics.values())


def test_covariance_losses_touch_the_tokens_that_their_selection_names():
    old = torch.zeros(1, 4)
    new = torch.tensor([[0.0, 0.1, 0.0, 3.0]])
    advantages, mask = torch.tensor([[-1.0, 1.0, 0.5, 4.0]]), torch.ones(1, 4)
    chosen = losses.get("kl_cov").select(old, new, advantages, mask, config=actor("kl_cov"))
    assert chosen.tolist() == [[False, False, False, True]]  # one token at least, the one of largest covariance
    config = actor("clip_cov", clip_cov_ratio=1.0, clip_cov_lb=0.5, clip_cov_ub=2.0)
    spared = losses.get("clip_cov").select(old, new, advantages, mask, config=config)
    assert spared.tolist() == [[True, False, False, False]]  # cov 1.647; the last token has 6.42, and is clipped anyway
    _, metrics = losses.get("clip_cov")(old, new, advantages, mask, config=config, selected=spared)
    assert metrics["pg_clipfrac"].item() == 0.25


def test_a_selection_repeats_under_its_seed_and_differs_between_steps():
    batch = make_batch(0, 40, 40)
    config = actor("clip_cov", clip_cov_ratio=0.1, clip_cov_lb=-1.0, clip_cov_ub=1.0)

    def chosen(*place):
        generator = losses.selection_generator(*place)
        return losses.get("clip_cov").select(batch.old, batch.new, batch.advantages, batch.mask, config=config, generator=generator)

    assert torch.equal(chosen(1, 5, 0), chosen(1, 5, 0)) and chosen(1, 5, 0).sum() == int(0.1 * batch.mask.sum())
    assert not torch.equal(chosen(1, 5, 0), chosen(1, 6, 0)) and not torch.equal(chosen(1, 5, 0), chosen(1, 5, 1))
    assert not (chosen(1, 5, 0) & ~batch.mask.bool()).any()


def test_bypass_with_reinforce_weighs_by_the_current_policy_and_rejects():
    old, new, advantages = torch.tensor([[-1.0, -1.0, -1.0]]), torch.tensor([[-0.5, -1.2, -3.0]], requires_grad=True), torch.ones(1, 3)
    correction = RolloutCorrection(bypass_mode=True, loss_type="reinforce", rollout_is_threshold=1.2)
    loss, metrics = losses.get("bypass_mode")(old, new, advantages, torch.ones(1, 3), correction=correction)
    loss.backward()
    weights = [1.2, math.exp(-0.2), math.exp(-2.0)]
    assert new.grad[0].tolist() == pytest.approx([-w / 3 for w in weights], rel=1e-5) and metrics["rejected_tokens"].item() == 0
    rejecting = RolloutCorrection(bypass_mode=True, loss_type="reinforce", rollout_is_threshold=1.2, rollout_rs="token_k1", rollout_rs_threshold=2.0)
    loss, metrics = losses.get("bypass_mode")(old, new.detach(), advantages, torch.ones(1, 3), correction=rejecting)
    assert loss.item() == pytest.approx((1.2 * 0.5 + math.exp(-0.2) * 1.2) / 2, rel=1e-5) and metrics["rejected_tokens"].item() == 1
    plain = losses.get("bypass_mode")(old, new.detach(), advantages, torch.ones(1, 3), rollout_is_weights=torch.zeros(1, 3))[0]
    assert plain.item() == pytest.approx(losses.get("vanilla")(old, new.detach(), advantages, torch.ones(1, 3))[0].item())


@pytest.mark.parametrize(("pred", "value", "target", "loss", "clipped"), [(2, 1, 0, 2.0, 0.0), (1, 2, 0, 1.125, 1.0), (1, 1, 0, 0.5, 0.0)])
def test_value_loss_takes_the_larger_error(pred, value, target, loss, clipped):
    got, metrics = losses.value_loss(ONE * pred, ONE * target, ONE * value, ONE)
    assert got.item() == pytest.approx(loss) and metrics["vf_clipfrac"].item() == clipped
    with pytest.raises(ValueError, match="cliprange_value"):
        losses.value_loss(ONE, ONE, ONE, ONE, cliprange_value=0.0)

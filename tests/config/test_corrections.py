"""Every error of the correction section and of the loss keys that is visible without a batch."""

import msgspec
import pytest

from streamrl.config.corrections import REJECTION_RULES, Rejection, parse_rejections, parse_threshold
from streamrl.config.losses import POLICY_LOSSES, agg_mode, idle_options
from streamrl.config.training import ActorConfig, PolicyLossConfig, RolloutCorrection


@pytest.mark.parametrize(("value", "bounds"), [(2.0, (None, 2.0)), (3, (None, 3.0)), ("1.5", (None, 1.5)), ("0.5_2.0", (0.5, 2.0)), ("1_1", (1.0, 1.0))])
def test_thresholds_of_weights_are_read(value, bounds):
    assert parse_threshold(value) == bounds


@pytest.mark.parametrize(
    ("value", "error"),
    [(True, TypeError), ([2.0], TypeError), (None, TypeError)]
    + [(value, ValueError) for value in ("", "_", "a_b", "1_2_3", "0.5_", "nan", "inf", "0_2", "-1_2", 0.0, -1, "2_1", float("nan"), float("inf"))],
)
def test_bad_thresholds_of_weights_are_refused(value, error):
    with pytest.raises(error, match="rollout_is_threshold"):
        parse_threshold(value)
    with pytest.raises(error, match="rollout_is_threshold"):
        RolloutCorrection(rollout_is_threshold=value)


def test_rules_and_bounds_are_paired():
    assert parse_rejections("token_k1, seq_mean_k3", "0.5_2.0, 0.1") == [Rejection("token_k1", 0.5, 2.0), Rejection("seq_mean_k3", None, 0.1)]
    assert parse_rejections("token_k1,token_k2", 2) == [Rejection("token_k1", 0.5, 2.0), Rejection("token_k2", None, 2.0)]
    assert {(Rejection(rule, None, 1.0).level, rule[:3]) for rule in REJECTION_RULES} == {("token", "tok"), ("sum", "seq"), ("mean", "seq"), ("max", "seq")}


@pytest.mark.parametrize(
    ("rules", "threshold", "said"),
    [
        ("token_k1", None, "needs rollout_rs_threshold"),
        ("token_k1", True, "needs rollout_rs_threshold"),
        ("token_k1,token_k2,token_k3", "1,2", "as many as rules"),
        ("token_k1", "2,3", "as many as rules"),
        ("", 2.0, "comma list"),
        (" , ", 2.0, "comma list"),
        ("token_k4", 2.0, "comma list"),
        ("seq_max_k1", 2.0, "comma list"),
        ("token_k1,token_k1", 2.0, "comma list"),
        ("token_k1", "x", "bounds of token_k1"),
        ("token_k1", "", "bounds of token_k1"),
        ("token_k1", 0.5, "bounds of token_k1"),
        ("token_k1", "2_1", "bounds of token_k1"),
        ("token_k1", "0_2", "bounds of token_k1"),
        ("token_k1", "-1", "bounds of token_k1"),
        ("seq_sum_k2", "0.1_0.2", "one positive upper bound"),
        ("token_k3", 0, "one positive upper bound"),
        ("token_k1,seq_max_k3", "0.5_2.0", "one positive upper bound"),  # one value, but not legal for both
        ("token_k2,seq_mean_k1", 0.5, "bounds of seq_mean_k1"),
    ],
)
def test_bad_rules_are_refused(rules, threshold, said):
    with pytest.raises(ValueError, match=said):
        RolloutCorrection(rollout_rs=rules, rollout_rs_threshold=threshold)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"rollout_is": "seq"}, "rollout_is must be"),
        ({"loss_type": "ppo"}, "loss_type must be"),
        ({"rollout_rs_threshold": 2.0}, "no rule"),
        ({"loss_type": "reinforce"}, "bypass mode only"),
        ({"bypass_mode": True}, "count it twice"),
        ({"bypass_mode": True, "loss_type": "reinforce", "rollout_is_batch_normalize": True}, "whole batch"),
        ({"rollout_is": None, "rollout_is_batch_normalize": True}, "whole batch"),
    ],
)
def test_settings_without_effect_are_refused(keys, said):
    with pytest.raises(ValueError, match=said):
        RolloutCorrection(**keys)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(keys, RolloutCorrection)


def test_legal_settings_stand():
    RolloutCorrection(bypass_mode=True, rollout_is=None)
    RolloutCorrection(bypass_mode=True, loss_type="reinforce", rollout_is="sequence", rollout_rs="seq_mean_k1", rollout_rs_threshold=1.01)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"loss_mode": "Vanilla"}, "loss_mode must be one of"),
        ({"loss_mode": "dro"}, "dro_beta=0.0"),
        ({"dppo_truncation": 0.0}, "dppo_truncation"),
        ({"clip_cov_ratio": 0.0}, "clip_cov_ratio"),
        ({"clip_cov_lb": 6.0}, "clip_cov_ub"),
        ({"kl_cov_ratio": 2.0}, "kl_cov_ratio"),
    ],
)
def test_a_loss_with_impossible_constants_is_refused(keys, said):
    with pytest.raises(ValueError, match=said):
        PolicyLossConfig(**keys)


def test_a_loss_of_user_code_is_named_by_its_path():
    actor = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="my.losses:mine"))
    assert agg_mode(actor) == "token-mean" and idle_options("my.losses:mine", {"clip_ratio"}) == []


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_the_aggregation_is_the_losss_own_unless_set(name):
    loss = PolicyLossConfig(loss_mode=name, dro_beta=1.0)
    own = "seq-mean-token-mean" if name in ("gspo", "sapo", "geo_mean") else "token-mean"
    assert agg_mode(ActorConfig(policy_loss=loss)) == own
    if name in ("sapo", "geo_mean"):
        with pytest.raises(ValueError, match="aggregates by"):
            ActorConfig(policy_loss=loss, loss_agg_mode="token-sum")
    else:
        assert agg_mode(ActorConfig(policy_loss=loss, loss_agg_mode="token-sum")) == "token-sum"


def test_options_that_a_loss_never_reads_are_named():
    assert idle_options("gpg", {"clip_ratio", "clip_ratio_c", "grad_clip", "policy_loss.dro_beta"}) == ["clip_ratio", "clip_ratio_c", "policy_loss.dro_beta"]
    assert idle_options("vanilla", {"clip_ratio", "clip_ratio_c", "tau_pos"}) == ["tau_pos"]
    every = set().union(*(traits.options for traits in POLICY_LOSSES.values()))
    assert {key for key in every if "." not in key} <= set(ActorConfig.__struct_fields__)
    assert {key.removeprefix("policy_loss.") for key in every if "." in key} == set(PolicyLossConfig.__struct_fields__) - {"loss_mode"}
    with pytest.raises(ValueError, match="temperatures"):
        ActorConfig(tau_neg=0.0)

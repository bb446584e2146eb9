"""The options of the algorithm on one rank: each acts, and none of it depends on how rows are split."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from streamrl.algorithms import losses
from streamrl.config.training import ActorConfig, AlgorithmConfig, KLControl, OptimConfig, PolicyLossConfig, RefConfig, RolloutCorrection
from streamrl.errors import ConfigError, ProtocolError, RunFailed
from streamrl.learner.plan import plan_update
from streamrl.learner.scoring import score_rows
from tests.learner.fakes import DictStore, make_rank, make_rows, save_tiny_llama
from tests.learner.two_ranks import CRITICS, FAMILIES, family_steps, one_step

LR = OptimConfig(lr=1e-3)
FAR = {"rollout_rs": "seq_mean_k2", "rollout_rs_threshold": 3.0}
KL_IN_REWARD = AlgorithmConfig(use_kl_in_reward=True, kl_ctrl=KLControl(type="adaptive", kl_coef=0.5, horizon=100))


@losses.register("test_sees_its_batch")
def sees_its_batch(old_log_probs, log_probs, advantages, loss_mask, *, batch_num_tokens, dp_size, **others):
    """Depends on its batch and has no way to prepare that."""
    return (-(advantages - advantages.mean()) * log_probs * loss_mask).sum() / batch_num_tokens * dp_size, {}


sees_its_batch.batch_dependent = True


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("model"), hidden=32, layers=1)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("other"), hidden=32, layers=1, seed=5)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(micro=st.one_of(st.integers(1, 5), st.none()), budget=st.integers(24, 90), backwards=st.booleans())
def test_loss_gradient_and_metrics_do_not_depend_on_split_or_order(model, tmp_path, family, micro, budget, backwards):
    actor, algorithm = FAMILIES[family]
    results = []
    for split in (
        {"ppo_max_token_len_per_gpu": 4000},
        {"use_dynamic_bsz": micro is None, "ppo_micro_batch_size_per_gpu": micro, "ppo_max_token_len_per_gpu": budget},
    ):
        store, changed = DictStore(), replace(actor, **split, ppo_mini_batch_size=4)
        critic = CRITICS.get(family) and replace(CRITICS[family], ppo_mini_batch_size=4)  # its micro-batches are the actor's
        rank = make_rank(model, store, tmp_path, actor=changed, algorithm=algorithm, critic=critic)
        results.append(family_steps(rank, 1, store, changed, reversed=backwards and bool(results)))
        rank.stop()
    for whole, parts in zip(*results, strict=True):
        compared = {name: value for name, value in whole.items() if not name.endswith("/computed_tokens")}
        assert {name: parts[name] for name in compared} == pytest.approx(compared, rel=2e-3, abs=2e-5)


def test_a_session_of_several_rows_counts_once_in_a_mean_of_sequences(model, tmp_path):
    """Two rows of one session weigh half each: the gradient is that of the hand-written mean over sessions."""
    store = DictStore()
    meta = make_rows(store, 2, 2, seed=8, outputs=3)
    actor = ActorConfig(loss_agg_mode="seq-mean-token-mean", optim=LR, ppo_micro_batch_size_per_gpu=2)
    algorithm = AlgorithmConfig(rollout_correction=RolloutCorrection(rollout_is=None))
    rank = make_rank(model, store, tmp_path, actor=actor, algorithm=algorithm)
    _, report = one_step(rank, 1, store, meta, actor)
    per_session = {}
    for key in meta.keys:
        per_session.setdefault(key.rsplit("_", 1)[0], []).append(-store.rows[key]["advantages"].mean())
    expected = torch.stack([torch.stack(rows).mean() for rows in per_session.values()]).mean()
    assert len(meta.keys) == 8 and len(per_session) == 4
    assert report.metrics["actor/pg_loss"] == pytest.approx(float(expected), abs=1e-6)
    assert sorted({round(float(store.rows[key]["session_weight"]), 4) for key in meta.keys}) == [0.3333, 1.0]
    rank.stop()


def test_the_scoring_pass_writes_what_the_estimator_needs_of_the_whole_distribution(model, tmp_path):
    store = DictStore()
    meta = make_rows(store, 2, 2, observations=True)
    rank = make_rank(model, store, tmp_path, algorithm=AlgorithmConfig(adv_estimator="optimal_token_baseline"), temperature=0.7)
    rank.log_probs(meta)
    plain = AutoModelForCausalLM.from_pretrained(model)
    for key in meta.keys:
        row, size = store.rows[key], len(store.rows[key]["response_mask"])
        with torch.no_grad():
            probs = (plain(input_ids=row["input_ids"][None]).logits[0, -size - 1 : -1] / 0.7).softmax(-1)
        torch.testing.assert_close(row["sum_pi_squared"], probs.square().sum(-1) * row["response_mask"], atol=1e-5, rtol=1e-4)
    assert "sum_pi_squared" not in _scored(model, tmp_path, AlgorithmConfig())
    rank.stop()


def _scored(model, tmp_path, algorithm):
    store = DictStore()
    meta = make_rows(store, 1, 2)
    rank = make_rank(model, store, tmp_path, algorithm=algorithm)
    rank.log_probs(meta)
    rank.stop()
    return store.rows[meta.keys[0]]


def test_the_reference_is_the_starting_model_for_ever(model, tmp_path):
    store = DictStore()
    meta = make_rows(store, 3, 3)
    actor = ActorConfig(optim=LR)
    rank = make_rank(model, store, tmp_path, actor=actor, algorithm=KL_IN_REWARD)
    first, _ = one_step(rank, 1, store, meta, actor)
    start = {key: store.rows[key]["ref_log_prob"].clone() for key in meta.keys}
    assert all(torch.equal(start[key], store.rows[key]["old_log_probs"]) for key in meta.keys), "the policy has not moved yet"
    assert first.metrics["actor/reward_kl_penalty"] == 0 and first.metrics["actor/reward_kl_penalty_coeff"] == 0.5
    second, _ = one_step(rank, 1, store, meta, actor)
    assert second.metrics["actor/reward_kl_penalty"] != 0 and second.metrics["actor/reward_kl_penalty_coeff"] == pytest.approx(0.5 * (1 - 0.2 * 9 / 100))
    beta = rank._controller.beta
    (tmp_path / "saved").mkdir()
    rank.stage()
    rank.save(str(tmp_path / "saved"))
    rank.stop()
    resumed = make_rank(model, store, tmp_path, actor=actor, algorithm=KL_IN_REWARD)
    resumed.load(str(tmp_path / "saved"))
    third, _ = one_step(resumed, 1, store, meta, actor)
    assert third.metrics["actor/reward_kl_penalty_coeff"] == beta < 0.5
    for key in meta.keys:
        assert torch.equal(store.rows[key]["ref_log_prob"], start[key]) and not torch.equal(store.rows[key]["old_log_probs"], start[key])
    resumed.stop()


def test_a_kl_in_the_reward_lowers_the_rewards_of_tokens_and_leaves_the_scores(model, other, tmp_path):
    store = DictStore()
    meta = make_rows(store, 2, 2)
    rank = make_rank(model, store, tmp_path, actor=ActorConfig(optim=LR), algorithm=KL_IN_REWARD, ref=RefConfig(path=other))
    one_step(rank, 1, store, meta, ActorConfig(optim=LR))
    for key in meta.keys:
        row = store.rows[key]
        torch.testing.assert_close(row["token_level_scores"], row["rm_scores"])
        torch.testing.assert_close(row["token_level_rewards"], row["rm_scores"] - 0.5 * (row["old_log_probs"] - row["ref_log_prob"]))
    rank.stop()


def test_a_kl_in_the_loss_pulls_back_to_the_reference(model, other, tmp_path):
    actor = ActorConfig(optim=LR, use_kl_loss=True, kl_loss_coef=100.0, kl_loss_type="mse")
    store = DictStore()
    meta = make_rows(store, 2, 3)
    rank = make_rank(model, store, tmp_path, actor=actor, ref=RefConfig(path=other))
    gaps = [one_step(rank, 1, store, meta, actor)[1].metrics["actor/kl_loss"] for _ in range(4)]
    assert gaps == sorted(gaps, reverse=True) and gaps[-1] < 0.9 * gaps[0]
    rank.stop()


def test_bypass_mode_takes_the_engine_s_word_and_runs_no_pass(model, tmp_path):
    store = DictStore()
    meta = make_rows(store, 2, 3)
    correction = RolloutCorrection(rollout_is=None, bypass_mode=True)
    rank = make_rank(model, store, tmp_path, algorithm=AlgorithmConfig(rollout_correction=correction))
    _, update = one_step(rank, 1, store, meta, ActorConfig(optim=LR))
    for key in meta.keys:
        row = store.rows[key]
        assert torch.equal(row["old_log_probs"], row["rollout_log_probs"]) and "entropy" not in row and "rollout_is_weights" not in row
    assert update.applied == 1 and update.metrics["actor/ratio_max"] > 1.1
    rank.stop()


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "token-sum"])
@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_what_bypass_mode_rejects_leaves_numerator_and_denominator(model, tmp_path, mode, loss_type):
    """Row by row rejection equals a batch from which those rows are gone."""
    weights = "token" if loss_type == "reinforce" else None
    plain = RolloutCorrection(rollout_is=weights, bypass_mode=True, loss_type=loss_type)
    actor = ActorConfig(optim=LR, loss_agg_mode=mode, ppo_micro_batch_size_per_gpu=2)
    store = DictStore()
    meta = make_rows(store, 3, 3, seed=2, response=(4, 9))
    rank = make_rank(model, store, tmp_path, actor=actor, algorithm=AlgorithmConfig(rollout_correction=replace(plain, **FAR)))
    rank.log_probs(meta), rank.advantages(meta)
    rejected = far_rows(rank, store, meta, FAR["rollout_rs_threshold"])
    found = rank.update(work_of(meta, actor)).metrics
    rank.stop()
    assert 0 < len(rejected) < len(meta)
    assert found["actor/rejected_tokens"] == sum(len(store.rows[key]["loss_mask"]) for key in rejected)
    for key in rejected:
        store.rows[key]["loss_mask"] = torch.zeros_like(store.rows[key]["loss_mask"])
    rank = make_rank(model, store, tmp_path, actor=actor, algorithm=AlgorithmConfig(rollout_correction=plain))
    expected = rank.update(work_of(meta, actor)).metrics
    rank.stop()
    for name in ("pg_loss", "grad_norm", "ppo_kl", "pg_clipfrac"):
        assert found[f"actor/{name}"] == pytest.approx(expected[f"actor/{name}"], rel=1e-4, abs=1e-6)


def work_of(meta, actor):
    return plan_update(meta, 1, actor, global_step=1, total_steps=9)[0]


def far_rows(rank, store, meta, bound):
    """Rows whose mean of (pi - mu)^2 / 2 is above the bound."""
    columns, _ = score_rows(rank.engine, rank._rows(meta, ["response_mask"]), ActorConfig())
    gaps = [pi - store.rows[key]["rollout_log_probs"] for key, pi in zip(meta.keys, columns["old_log_probs"], strict=True)]
    return [key for key, gap in zip(meta.keys, gaps, strict=True) if float((0.5 * gap**2).mean()) > bound]


def test_a_step_whose_tokens_are_all_rejected_is_skipped(model, tmp_path):
    correction = RolloutCorrection(rollout_is=None, bypass_mode=True, rollout_rs="token_k2", rollout_rs_threshold=1e-9)
    store = DictStore()
    rank = make_rank(model, store, tmp_path, algorithm=AlgorithmConfig(rollout_correction=correction))
    _, report = one_step(rank, 1, store, make_rows(store, 2, 2), ActorConfig(optim=LR))
    assert (report.applied, report.skipped) == (0, 1) and rank.updates["actor"].progress.optimizer_steps == 0
    rank.stop()


def test_a_loss_that_cannot_prepare_its_batch_is_refused_in_parts(model, tmp_path):
    policy_loss = PolicyLossConfig(loss_mode=f"{__name__}:test_sees_its_batch")
    for size, good in ((None, True), (2, False)):
        store = DictStore()
        actor = ActorConfig(optim=LR, policy_loss=policy_loss, ppo_micro_batch_size_per_gpu=size)
        rank = make_rank(model, store, tmp_path, actor=actor)
        if good:
            assert one_step(rank, 1, store, make_rows(store, 2, 2), actor)[1].applied == 1
        else:
            with pytest.raises(ConfigError, match=r"loss_mode: .* 2 micro-batches on 1 ranks"):
                one_step(rank, 1, store, make_rows(store, 2, 2), actor)
        rank.stop()


def test_unknown_user_code_fails_before_the_model_is_loaded(tmp_path):
    with pytest.raises(ValueError, match="no module"):
        make_rank("nowhere", DictStore(), tmp_path, ranks=2, algorithm=AlgorithmConfig(adv_estimator="not_there:mine"))


def test_a_bad_component_of_gdpo_rejects_its_session_alone(model, tmp_path):
    store = DictStore()
    meta = make_rows(store, 2, 3, seed=6)
    store.rows["g0_1_0"]["reward_extra_info"]["b"] = math.nan
    algorithm = AlgorithmConfig(adv_estimator="gdpo", gdpo_reward_keys=("a", "b"), gdpo_reward_weights=(1.0, 2.0))
    rank = make_rank(model, store, tmp_path, algorithm=algorithm)
    rank.log_probs(meta)
    report = rank.advantages(meta)
    assert report.rejected == [("g0_1_0", "non_finite_reward")]
    assert not store.rows["g0_1_0"]["loss_mask"].any() and all(store.rows[key]["advantages"].any() for key in meta.keys if key != "g0_1_0")
    rank.stop()


@pytest.mark.parametrize("column", ["rollout_log_probs", "old_log_probs"])
def test_a_number_that_is_not_finite_is_stopped_with_its_key(model, tmp_path, column):
    store = DictStore()
    meta = make_rows(store, 2, 3)
    rank = make_rank(model, store, tmp_path)
    rank.log_probs(meta)
    store.rows["g1_2_0"][column] = torch.full_like(store.rows["g1_2_0"][column], math.nan)
    with pytest.raises(ProtocolError, match=rf"{column} is finite .*g1_2_0"):
        rank.advantages(meta)
    rank.stop()


def test_broken_weights_are_noticed_by_the_scoring_pass(model, tmp_path):
    store = DictStore()
    meta = make_rows(store, 1, 2)
    rank = make_rank(model, store, tmp_path)
    with torch.no_grad():
        next(iter(rank.engine.parameters.values())).to_local().fill_(math.nan)
    with pytest.raises(RunFailed, match=r"2 rows, of this rank \['g0_0_0', 'g0_1_0'\]"):
        rank.log_probs(meta)
    rank.stop()


def test_a_step_tells_early_what_goes_wrong(model, tmp_path):
    store = DictStore()
    meta = make_rows(store, 3, 3)
    meta.extra_info = {"version": 5}
    for key in meta.keys:
        store.rows[key]["rollout_versions"] = torch.full_like(store.rows[key]["response_mask"], 5 - int(key[1]) * 2)
    rank = make_rank(model, store, tmp_path)
    report, update = one_step(rank, 1, store, meta, ActorConfig(optim=LR))
    assert {"rollout_corr/kl/lag_0", "rollout_corr/kl/lag_2_3", "rollout_corr/truncated_ratio/lag_4_up", "rollout_corr/ess_ratio"} <= set(report.metrics)
    assert {"training/zero_variance_share", "training/rejected_token_share", "training/rollout_log_prob_gap_p99"} <= set(report.metrics)
    assert {"actor/entropy", "actor/entropy_p10", "actor/entropy_near_zero"} <= set(report.metrics)
    found = {
        name: update.metrics[f"actor/{name}"]
        for name in ("ratio_p1", "ratio_p50", "ratio_p99.9", "ratio_ess", "kl_k1", "kl_k2", "kl_k3", "clip_low", "clip_high")
    }
    assert found["ratio_p50"] == pytest.approx(1) and found["ratio_ess"] == pytest.approx(1) and found["kl_k3"] == pytest.approx(0, abs=1e-6)
    rank.stop()

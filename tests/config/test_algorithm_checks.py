"""A configured option acts or is refused; what nothing can make is refused; what is doubtful is said."""

import pytest

from streamrl.config.checks import check
from streamrl.config.estimators import ESTIMATORS
from streamrl.config.load import load, resolve
from streamrl.config.losses import POLICY_LOSSES
from streamrl.config.objective import objective
from streamrl.errors import ConfigError

GOOD = ["model.path=m", "data.train_files=t.parquet", "rollout.n=8", "actor.use_dynamic_bsz=true", "data.train_batch_size=64", "actor.ppo_mini_batch_size=64"]
CORRECTION = "algorithm.rollout_correction"
BYPASS = f"{CORRECTION}.bypass_mode=true {CORRECTION}.rollout_is=null"
REINFORCE = f"{CORRECTION}.bypass_mode=true {CORRECTION}.loss_type=reinforce"


def configured(overrides: str):
    return load([], [*GOOD, *overrides.split()])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("algorithm.gamma=0.9", r"\$\.algorithm\.gamma: has no effect with adv_estimator=grpo \(read by gae, reinforce_plus_plus\), got 0\.9; drop it"),
        ("algorithm.lam=0.9 algorithm.adv_estimator=reinforce_plus_plus", r"\$\.algorithm\.lam"),
        ("algorithm.norm_adv_by_std_in_grpo=false algorithm.adv_estimator=rloo", r"\$\.algorithm\.norm_adv_by_std_in_grpo"),
        ("algorithm.gdpo_reward_keys=[a]", r"\$\.algorithm\.gdpo_reward_keys"),
        ("algorithm.f_norm=2", r"\$\.algorithm\.f_norm"),
        ("algorithm.multi_output=chain", r"\$\.algorithm\.multi_output"),
        ("algorithm.group_stats=all algorithm.adv_estimator=remax", r"\$\.algorithm\.group_stats"),
        ("actor.policy_loss.loss_mode=gpg actor.clip_ratio=0.3", r"\$\.actor\.clip_ratio: has no effect on the loss that acts, gpg, got 0\.3"),
        ("actor.policy_loss.loss_mode=gpg actor.clip_ratio_high=0.3", r"\$\.actor\.clip_ratio_high"),
        ("actor.policy_loss.loss_mode=cispo actor.clip_ratio_c=4", r"\$\.actor\.clip_ratio_c"),
        ("actor.tau_pos=2", r"\$\.actor\.tau_pos"),
        ("actor.policy_loss.dro_beta=0.5", r"\$\.actor\.policy_loss\.dro_beta"),
        ("actor.policy_loss.loss_mode=sapo actor.loss_agg_mode=token-mean", r"loss_agg_mode"),
        (f"{CORRECTION}.loss_type=reinforce", r"loss_type"),
        (f"{CORRECTION}.rollout_is=null {CORRECTION}.rollout_is_threshold=3.0", r"\$\.algorithm\.rollout_correction\.rollout_is_threshold"),
        (f"{CORRECTION}.bypass_mode=true", r"rollout_is"),
        (f"{BYPASS} actor.policy_loss.loss_mode=gspo", r"\$\.actor\.policy_loss\.loss_mode: .*bypass_mode=true"),
        ("actor.policy_loss.loss_mode=bypass_mode", r"\$\.actor\.policy_loss\.loss_mode: .*which is false"),
        (f"{REINFORCE} actor.clip_ratio=0.3", r"\$\.actor\.clip_ratio: .*loss_type=reinforce"),
        ("algorithm.kl_penalty=mse", r"\$\.algorithm\.kl_penalty: .*use_kl_in_reward=false"),
        ("algorithm.kl_ctrl.kl_coef=0.1", r"\$\.algorithm\.kl_ctrl\.kl_coef"),
        ("algorithm.use_kl_in_reward=true algorithm.kl_ctrl.horizon=5", r"\$\.algorithm\.kl_ctrl\.horizon: .*type=fixed"),
        ("actor.kl_loss_type=mse", r"\$\.actor\.kl_loss_type: .*use_kl_loss=false"),
        ("actor.kl_loss_coef=0.1", r"\$\.actor\.kl_loss_coef"),
        ("actor.use_kl_loss=true actor.kl_loss_coef=-1", r"\$\.actor\.kl_loss_coef: must be above 0 with"),
        ("ref.path=other", r"\$\.ref\.path: has no effect without a KL"),
        ("algorithm.adv_estimator=gae critic.enable=false", r"\$\.critic\.enable: must not be false with adv_estimator=gae"),
        (f"algorithm.adv_estimator=optimal_token_baseline {BYPASS}", r"bypass_mode: .*sum_pi_squared"),
        ("algorithm.adv_estimator=grpo_passk rollout.n=1", r"\$\.rollout\.n: grpo_passk"),
        ("algorithm.min_group_size=9", r"\$\.algorithm\.min_group_size"),
        ("algorithm.adv_estimator=rloo_vectorized rollout.n=1", r"\$\.rollout\.n: rloo_vectorized"),
        ("algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=[a] algorithm.use_kl_in_reward=true", r"use_kl_in_reward: has no effect with .*gdpo"),
        ("algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=[a,b] algorithm.gdpo_reward_weights=[0,0]", r"gdpo_reward_weights must hold a weight other"),
        ("algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0", r"\$\.algorithm\.kl_ctrl\.kl_coef: must be above 0"),
        ("algorithm.use_kl_in_reward=true algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.kl_coef=0", r"adaptive coefficient never leaves it, got 0"),
        ("algorithm.use_kl_in_reward=true algorithm.kl_penalty=k3+", r"\$\.algorithm\.kl_penalty: .*use k3,"),
        ("actor.use_kl_loss=true actor.kl_loss_coef=0", r"\$\.actor\.kl_loss_coef: must be above 0"),
        ("actor.entropy_coeff=-1", r"\$\.actor\.entropy_coeff: must be 0 or above"),
        ("actor.policy_loss.loss_mode=kl_cov actor.policy_loss.ppo_kl_coef=0", r"kl_cov needs a penalty above 0"),
        ("algorithm.group_stats=all", r"\$\.algorithm\.group_stats: has no effect with .*rollout_rs=null"),
        (f"algorithm.group_stats=all {BYPASS} {CORRECTION}.rollout_rs=token_k1 {CORRECTION}.rollout_rs_threshold=2", r"group_stats: .*bypass_mode=true"),
        ("algorithm.filter_groups.metric=acc", r"\$\.algorithm\.filter_groups\.metric: has no effect with .*enable=false"),
        ("actor.data_loader_seed=7", r"\$\.actor\.data_loader_seed: has no effect with actor.shuffle=false"),
        ("actor.optim.min_lr_ratio=0.1", r"\$\.actor\.optim\.min_lr_ratio: has no effect with .*constant"),
        ("actor.use_dynamic_bsz=false actor.ppo_max_token_len_per_gpu=2048", r"\$\.actor\.ppo_max_token_len_per_gpu: has no effect"),
        ("weights.probe=false weights.probe_tolerance=0.1", r"\$\.weights\.probe_tolerance: has no effect with weights.probe=false"),
        ("actor.clip_ratio=0.3 actor.clip_ratio_low=0.1 actor.clip_ratio_high=0.28", r"\$\.actor\.clip_ratio: has no effect with both"),
        (f"rollout.calculate_log_probs=false {BYPASS}", r"\$\.rollout\.calculate_log_probs: .*bypass_mode=True"),
    ],
)
def test_what_cannot_act_is_refused_with_its_path(overrides, said):
    with pytest.raises(ConfigError, match=said):
        check(configured(overrides))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("rollout.n=1 algorithm.adv_estimator=rloo", "adv_estimator=rloo: a group of one"),
        ("algorithm.use_kl_in_reward=true actor.use_kl_loss=true", "both on"),
        ("actor.use_kl_loss=true actor.kl_loss_type=kl", "expected gradient of 0"),
        ("actor.loss_agg_mode=token-sum", "token-sum grows"),
        ("rollout.n=1 algorithm.adv_estimator=opo", "its advantage is its raw reward"),
        ("rollout.n=1 algorithm.adv_estimator=reinforce_plus_plus_baseline", "it is compared with the whole batch"),
        ("rollout.n=1 algorithm.adv_estimator=optimal_token_baseline", "its advantage is its reward to go"),
        ("actor.shuffle=true", "one epoch of one mini-batch has no order"),
        (f"{REINFORCE} {CORRECTION}.rollout_is=null replay.max_staleness=1", "OFF-POLICY CORRECTION IS OFF"),
        (f"{BYPASS} rollout.top_p=0.9", "rollout.top_p changes the distribution"),
    ],
)
def test_doubtful_choices_are_said_once(overrides, said):
    warnings = check(configured(overrides))
    assert len(warnings) == 1 and said in warnings[0]


EXTRA = {"gdpo": "algorithm.gdpo_reward_keys=[a,b]", "dro": "actor.policy_loss.dro_beta=0.5"}


@pytest.mark.parametrize("estimator", sorted(set(ESTIMATORS) - {"gae"}))
def test_every_estimator_passes_resolved_and_unresolved_and_is_named_in_the_objective(estimator):
    config = configured(f"algorithm.adv_estimator={estimator} {EXTRA.get(estimator, '')}")
    assert check(config) == check(resolve(config)) == []
    assert f"{estimator} advantage" in objective(resolve(config))


@pytest.mark.parametrize("loss", sorted(set(POLICY_LOSSES) - {"bypass_mode"}))
def test_every_loss_passes_resolved_and_unresolved_and_is_named_in_the_objective(loss):
    config = configured(f"actor.policy_loss.loss_mode={loss} {EXTRA.get(loss, '')}")
    assert check(config) == check(resolve(config)) == []
    assert f" of {loss} loss" in objective(config) and objective(config) == objective(resolve(config))


@pytest.mark.parametrize(
    "overrides",
    [
        f"algorithm.group_stats=all {CORRECTION}.rollout_rs=token_k1 {CORRECTION}.rollout_rs_threshold=2",
        "algorithm.filter_groups.enable=true algorithm.filter_groups.metric=acc",
        "actor.shuffle=true actor.ppo_epochs=2 actor.data_loader_seed=7",
        "actor.optim.lr_scheduler_type=cosine actor.optim.min_lr_ratio=0.1",
        "weights.probe=false rollout.dtype=float32 learner.dtype=float32",
        "actor.clip_ratio=0.3 actor.clip_ratio_high=0.28",
        "algorithm.use_kl_in_reward=true algorithm.kl_penalty=k3",
        f"{BYPASS} replay.max_staleness=1",
        f"{REINFORCE} replay.max_staleness=1",
    ],
)
def test_options_that_act_pass_resolved_and_unresolved(overrides):
    config = configured(overrides)
    assert check(config) == check(resolve(config)) == []


def test_options_of_user_code_are_not_refused():
    assert check(configured("algorithm.adv_estimator=mine:own algorithm.gamma=0.9 actor.policy_loss.loss_mode=mine:loss actor.tau_pos=2")) == []


def test_the_objective_is_one_line_that_says_every_part():
    text = objective(resolve(configured("")))
    assert text == (
        "grpo advantage (over group std); token-mean of vanilla loss (clip [1 - 0.2, 1 + 0.2], dual clip 3); "
        "token-level importance weights truncated at 2; no KL"
    )
    kl = "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.type=adaptive actor.use_kl_loss=true actor.entropy_coeff=0.01"
    text = objective(resolve(configured(f"{kl} {REINFORCE} {CORRECTION}.rollout_rs=token_k1 {CORRECTION}.rollout_rs_threshold=2")))
    for said in ("bypass_mode loss (reinforce)", "rejection by token_k1 at 2", "kl KL in the reward (steered to 0.1 from 0.001)", "low_var_kl KL in the loss"):
        assert said in text
    assert text.endswith("minus 0.01 entropy") and "\n" not in text

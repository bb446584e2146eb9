"""Section ``critic``: there iff something reads values, its open sizes the actor's, and no key without effect."""

import pytest

from streamrl.config.batching import critic_batching
from streamrl.config.checks import check
from streamrl.config.load import load, resolve
from streamrl.config.objective import objective, uses_critic
from streamrl.errors import ConfigError

GOOD = ["model.path=m", "data.train_files=t.parquet", "rollout.n=8", "data.train_batch_size=64", "actor.ppo_mini_batch_size=32", "actor.use_dynamic_bsz=true"]
GAE = "algorithm.adv_estimator=gae"


def configured(*overrides: str):
    return load([], [*GOOD, *overrides])


def test_a_critic_is_trained_iff_the_estimator_reads_values_or_the_section_says_so():
    assert uses_critic(configured(GAE)) and not uses_critic(configured()) and uses_critic(configured("critic.enable=true"))
    for config in (configured(GAE), configured(), configured("critic.enable=true")):
        assert resolve(config).critic.enable is uses_critic(config) is uses_critic(resolve(config))


def test_what_is_left_open_is_the_actors_and_the_shuffle_is_on():
    critic = resolve(configured(GAE, "actor.ppo_epochs=2", "critic.ppo_mini_batch_size=16")).critic
    assert (critic.ppo_mini_batch_size, critic.ppo_epochs, critic.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu) == (16, 2, True, 16384)
    assert critic.shuffle and critic.optim.lr == 1e-5 and critic.path.endswith("m")
    assert resolve(configured(GAE, "critic.optim.weight_decay=0")).critic.optim.lr == 1e-5


def test_rows_of_the_actors_micro_batches_are_not_taken_over_where_tokens_size_the_critics():
    config = configured(GAE, "actor.use_dynamic_bsz=false", "actor.ppo_micro_batch_size_per_gpu=4", "critic.use_dynamic_bsz=true")
    assert critic_batching(config.critic, config.actor).ppo_micro_batch_size_per_gpu is None
    assert check(config) == []


@pytest.mark.parametrize("overrides", [(GAE,), (GAE, "critic.ppo_epochs=3", "trainer.critic_warmup=2"), ("critic.enable=true",), ("critic.enable=false",)])
def test_what_passes_passes_resolved_too(overrides):
    config = configured(*overrides)
    assert check(resolve(config)) == check(config)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (f"{GAE} critic.enable=false", r"\$\.critic\.enable: must not be false with adv_estimator=gae"),
        ("critic.ppo_epochs=2", r"\$\.critic\.ppo_epochs: has no effect without a critic \(adv_estimator=grpo reads no values\)"),
        ("critic.optim.lr=1e-4", r"\$\.critic\.optim: has no effect without a critic"),
        ("critic.path=other", r"\$\.critic\.path: has no effect without a critic"),
        ("trainer.critic_warmup=3", r"\$\.trainer\.critic_warmup: has no effect without a critic"),
        (f"{GAE} trainer.critic_warmup=5 trainer.total_training_steps=5", r"critic_warmup: must be below trainer\.total_training_steps \(5\)"),
        (f"{GAE} critic.ppo_mini_batch_size=48", r"\$\.critic\.ppo_mini_batch_size: data\.train_batch_size \(64 prompts\).*got 48"),
        (f"{GAE} critic.ppo_micro_batch_size_per_gpu=4", r"\$\.critic\.ppo_micro_batch_size_per_gpu: must be null with critic\.use_dynamic_bsz=true"),
        (f"{GAE} critic.ppo_max_token_len_per_gpu=100", r"\$\.critic\.ppo_max_token_len_per_gpu: must hold the longest row"),
        (f"{GAE} critic.use_dynamic_bsz=false critic.ppo_max_token_len_per_gpu=9999", r"\$\.critic\.ppo_max_token_len_per_gpu: has no effect with critic\.use"),
        (f"{GAE} critic.shuffle=false critic.data_loader_seed=7", r"\$\.critic\.data_loader_seed: has no effect with critic\.shuffle=false"),
        (f"{GAE} critic.optim.min_lr_ratio=0.1", r"\$\.critic\.optim\.min_lr_ratio: has no effect with .*constant"),
        (f"{GAE} critic.optim.lr=-1", r"\$\.critic\.optim\.lr: must be 0 or above"),
        (f"{GAE} critic.optim.lr_warmup_steps=9 trainer.total_training_steps=5", r"\$\.critic\.optim\.lr_warmup_steps: must not exceed"),
        (f"{GAE} critic.grad_clip=0", r"\$\.critic\.grad_clip: must be above 0"),
        (f"{GAE} critic.cliprange_value=0", r"\$\.critic\.cliprange_value: must be above 0"),
        (f"{GAE} critic.path=''", r"\$\.critic\.path: must not be empty"),
        (f"{GAE} critic.strategy=fsdp", "strategy"),
    ],
)
def test_what_cannot_act_is_refused_with_its_path(overrides, said):
    with pytest.raises(ConfigError, match=said):
        check(configured(*overrides.split()))


def test_a_critic_that_nothing_reads_is_said():
    assert "which reads no values" in check(configured("critic.enable=true"))[0]
    assert check(configured("critic.enable=true", "algorithm.adv_estimator=my.module:mine")) == []


def test_the_objective_names_the_critic():
    said = objective(configured(GAE, "trainer.critic_warmup=2"))
    assert said.endswith("critic by token-mean of the value loss (clip 0.5), lr 1e-05, alone in the first 2 steps")
    assert "critic" not in objective(configured())

"""Cross-section rules: what would fail later is refused now, what is probably not meant is said."""

import pytest

from streamrl.config.checks import check
from streamrl.config.load import load, resolve
from streamrl.config.plan import objective, plan
from streamrl.errors import ConfigError

GOOD = ["model.path=m", "data.train_files=t.parquet", "rollout.n=8", "actor.use_dynamic_bsz=true", "data.train_batch_size=64", "actor.ppo_mini_batch_size=64"]


def configured(*overrides: str):
    return load([], [*GOOD, *overrides])


def test_a_good_configuration_has_no_warnings():
    assert check(configured()) == []


@pytest.mark.parametrize("overrides", [(), ("replay.max_staleness=0",), ("replay.max_staleness=3", "rollout.num_actors=4"), ("rollout.n=1",)])
def test_what_passes_passes_resolved_too(overrides):
    config = configured(*overrides)
    assert check(resolve(config)) == check(config)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("data.train_files=[]", r"\$\.data\.train_files"),
        ("data.max_samples=10", r"\$\.data\.max_samples: .*train_batch_size \(64\)"),
        ("actor.ppo_mini_batch_size=48", r"\$\.actor\.ppo_mini_batch_size: data\.train_batch_size \(64 prompts\).*got 48"),
        ("trainer.parameter_sync_step=2", r"\$\.trainer\.parameter_sync_step: only 1 is supported"),
        ("trainer.test_freq=0", r"\$\.trainer\.test_freq"),
        ("trainer.total_training_steps=5 actor.optim.lr_warmup_steps=6", r"lr_warmup_steps.*total_training_steps \(5\)"),
        ("trainer.resume_mode=resume_path", r"\$\.trainer\.resume_from_path"),
        ("trainer.resume_mode=auto trainer.resume_from_path=r", r"\$\.trainer\.resume_mode.*resume_from_path \(r\)"),
        ("rollout.temperature=0", r"\$\.rollout\.temperature"),
        ("rollout.temperature=1e-30", r"\$\.rollout\.temperature: .*at least 0\.01"),
        ("model.path=''", r"\$\.model\.path: must not be empty"),
        ("model.lora_alpha=32", r"\$\.model: lora_alpha has no effect with lora_rank=0"),
        ("model.target_modules=q_proj", r"\$\.model: target_modules has no effect with lora_rank=0"),
        ("model.lora_rank=4 model.target_modules=[]", r"\$\.model: target_modules must be all-linear or names of linear layers"),
        ("run.seed=-1", r"\$\.run\.seed: must be 0 or above"),
        ("data.seed=4294967296", r"\$\.data\.seed: .*below 2\*\*32"),
        ("cluster.address=''", r"\$\.cluster\.address: must not be empty"),
        ("run.name=''", r"\$\.run\.name: must not be empty"),
        ("data.gen_batch_size=64", r"\$\.data\.gen_batch_size: must be null or 1: .*one by one"),
        ("data.gen_batch_size=0", r"\$\.data\.gen_batch_size"),
        ("data.val_batch_size=128", r"\$\.data\.val_batch_size: must be null: .*max_sessions_per_actor"),
        ("data.train_weights=[1,2]", r"\$\.data\.train_weights: .*each of the 1 files"),
        ("data.train_weights=[0]", r"\$\.data\.train_weights: .*above 0"),
        ("data.train_weights=[1] data.custom_cls.path=a.py data.custom_cls.name=A", r"\$\.data\.train_weights: must be null with data\.custom_cls"),
        ("data.custom_cls.path='' data.custom_cls.name=A", r"\$\.data\.custom_cls\.path: must not be empty"),
        ("data.apply_chat_template_kwargs.tools=[]", r"\$\.data\.apply_chat_template_kwargs: .*tools"),
        ("data.apply_chat_template_kwargs.tokenize=false", r"\$\.data\.apply_chat_template_kwargs"),
        ("weights.probe_tolerance=-1", r"\$\.weights\.probe_tolerance"),
        ("rollout.vllm.gpu_memory_utilization=0", r"\$\.rollout\.vllm\.gpu_memory_utilization: must be above 0"),
        ("learner.num_gpus_per_rank=1.5", r"\$\.learner\.num_gpus_per_rank: must be whole above 1"),
        ("rollout.top_p=0", r"\$\.rollout\.top_p"),
        ("rollout.val_kwargs.top_k=0", r"\$\.rollout\.val_kwargs\.top_k"),
        ("replay.min_sessions=9", r"\$\.replay\.min_sessions: .*rollout\.n \(8\)"),
        ("algorithm.min_group_size=9", r"\$\.algorithm\.min_group_size"),
        ("replay.lease_s=10", r"\$\.replay\.lease_s.*heartbeat"),
        ("dataplane.segment_bytes=1000000000", r"\$\.dataplane\.capacity_bytes"),
        ("rollout.calculate_log_probs=false", r"\$\.rollout\.calculate_log_probs.*rollout_is=token"),
        ("algorithm.rollout_correction.rollout_is_threshold=0", r"rollout_is_threshold"),
        ("actor.ppo_micro_batch_size_per_gpu=8", r"\$\.actor\.ppo_micro_batch_size_per_gpu.*use_dynamic_bsz.*ppo_max_token_len_per_gpu"),
        ("actor.ppo_max_token_len_per_gpu=1000", r"\$\.actor\.ppo_max_token_len_per_gpu: .*1024 tokens"),
        ("actor.log_prob_max_token_len_per_gpu=1000", r"\$\.actor\.log_prob_max_token_len_per_gpu: must hold the longest row"),
        ("actor.optim.lr=-1e-6", r"\$\.actor\.optim\.lr: must be 0 or above"),
        ("actor.clip_ratio_c=1.0", r"\$\.actor\.clip_ratio_c"),
        ("learner.num_gpus_per_rank=-1", r"\$\.learner\.num_gpus_per_rank"),
    ],
)
def test_broken_rules_are_refused_with_path_and_both_sides(overrides, said):
    with pytest.raises(ConfigError, match=said):
        check(configured(*overrides.split()))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("rollout.n=1", "group of one has no baseline"),
        ("algorithm.rollout_correction.rollout_is=null", "OFF-POLICY CORRECTION IS OFF"),
        ("rollout.top_p=0.9", "rollout.top_p changes the distribution"),
        ("rollout.top_k=50", "rollout.top_k changes the distribution"),
        ("rollout.dtype=float32", "rollout.dtype is float32 and learner.dtype is bfloat16"),
        ("data.dataloader_num_workers=8", "data.dataloader_num_workers is without effect"),
        ("data.filter_overlong_prompts_workers=4", "data.filter_overlong_prompts_workers is without effect"),
        ("trainer.test_freq=5", "nothing is validated"),
    ],
)
def test_doubtful_settings_warn_once(overrides, said):
    warnings = check(configured(*overrides.split()))
    assert len(warnings) == 1 and said in warnings[0]


def test_uncorrected_synchronous_training_needs_no_warning():
    assert check(configured("algorithm.rollout_correction.rollout_is=null", "replay.max_staleness=0")) == []


def test_the_plan_states_sizes_and_objective():
    config = resolve(configured("trainer.total_training_steps=60", "actor.ppo_epochs=2", "actor.ppo_mini_batch_size=32", "run.seed=7"))
    text = plan(config)
    assert "64 prompts x 8 samples = 512 trajectories" in text
    assert "60 training steps, 4 optimizer steps each: 240 in all" in text
    assert "at most 128 groups, asynchronous, at most 1 version stale" in text
    assert "seed 7" in text
    assert "token-level importance weights truncated at 2" in objective(config) and "[1 - 0.2, 1 + 0.2]" in objective(config)


def test_the_plan_turns_epochs_into_steps_when_the_rows_are_known():
    config = resolve(configured("trainer.total_epochs=3"))
    assert "3 epochs of the data" in plan(config)
    assert "45 training steps" in plan(config, num_rows=1000)

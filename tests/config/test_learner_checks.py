"""How a model is spread over the ranks: what cannot act is refused, what is harmless is said."""

import pytest

from streamrl.config.checks import check
from streamrl.config.load import load
from streamrl.errors import ConfigError

GOOD = ["model.path=m", "data.train_files=t.parquet", "rollout.n=8", "actor.use_dynamic_bsz=true", "data.train_batch_size=64", "actor.ppo_mini_batch_size=64"]


def configured(overrides: str):
    return load([], [*GOOD, *overrides.split()])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("learner.ranks=4 learner.fsdp_size=3", r"\$\.learner\.fsdp_size: must be -1 \(all ranks\) or a divisor of learner\.ranks=4.*got 3; use a divisor"),
        ("learner.shared_prompts=false model.use_remove_padding=false", r"\$\.learner\.shared_prompts: has no effect with model\.use_remove_padding=false"),
        ("learner.ranks=4 learner.fsdp_size=0", r"\$\.learner\.fsdp_size"),
        ("learner.ranks=2 learner.fsdp_size=4", r"\$\.learner\.fsdp_size"),
        ("learner.reshard_after_forward=false", r"\$\.learner\.reshard_after_forward: has no effect with learner\.ranks=1"),
        ("learner.ranks=2 learner.fsdp_size=1 learner.reshard_after_forward=false", r"\$\.learner\.reshard_after_forward"),
        ("learner.sync_every_micro_batch=true", r"\$\.learner\.sync_every_micro_batch: has no effect with learner\.ranks=1"),
        ("ref.param_offload=true", r"\$\.ref\.param_offload: has no effect without a KL"),
        ("ref.param_offload=true actor.use_kl_loss=true model.lora_rank=4", r"\$\.ref\.param_offload: has no effect with model\.lora_rank above 0"),
        ("actor.optim.lr_warmup_steps=2 actor.optim.lr_warmup_steps_ratio=0.1", r"lr_warmup_steps_ratio: has no effect with actor\.optim\.lr_warmup_steps=2"),
        ("actor.optim.lr_warmup_steps_ratio=1.5", r"lr_warmup_steps_ratio"),
    ],
)
def test_what_cannot_act_is_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        check(configured(overrides))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("learner.param_offload=true", "learner.param_offload: without effect with learner.num_gpus_per_rank=0"),
        ("learner.param_offload=true learner.num_gpus_per_rank=1 learner.optimizer_offload=true", "learner.optimizer_offload is without effect"),
    ],
)
def test_what_is_harmless_is_said(overrides, said):
    assert any(said in hint for hint in check(configured(overrides)))


@pytest.mark.parametrize(
    "overrides",
    [
        "learner.ranks=4 learner.fsdp_size=2 learner.reshard_after_forward=false learner.sync_every_micro_batch=true",
        "learner.num_gpus_per_rank=1 learner.optimizer_offload=true model.enable_gradient_checkpointing=true",
        "learner.num_gpus_per_rank=1 actor.use_kl_loss=true ref.param_offload=true",
        "actor.optim.lr_warmup_steps_ratio=0.05",
    ],
)
def test_what_acts_passes_without_a_word(overrides):
    assert check(configured(overrides)) == []

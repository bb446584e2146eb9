"""Sections ``algorithm``, ``actor``, ``learner`` and ``weights``: from complete groups to a published version."""

from __future__ import annotations

from typing import Literal

from streamrl.config.base import NonNegative, Positive, Seconds, Section


class RolloutCorrection(Section, frozen=True):
    """Off-policy correction between the policy that sampled and the one that trains. On by default."""

    rollout_is: Literal["token", "sequence"] | None = "token"
    rollout_is_threshold: float = 2.0


class AlgorithmConfig(Section, frozen=True):
    """Advantage estimation and correction."""

    adv_estimator: Literal["grpo"] = "grpo"
    norm_adv_by_std_in_grpo: bool = True
    rollout_correction: RolloutCorrection = RolloutCorrection()
    min_group_size: Positive | None = None  # accepted samples; None: min(2, n)


class PolicyLossConfig(Section, frozen=True):
    """Which policy loss."""

    loss_mode: Literal["vanilla"] = "vanilla"


class OptimConfig(Section, frozen=True):
    """AdamW and its schedule. The schedule advances once per update call."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    lr_warmup_steps: NonNegative = 0
    min_lr_ratio: float = 0.0


class ActorConfig(Section, frozen=True):
    """Policy update; names are verl's. Sizes count prompts unless the name says otherwise."""

    ppo_mini_batch_size: Positive = 256
    ppo_epochs: Positive = 1
    ppo_micro_batch_size_per_gpu: Positive | None = None  # trajectories; static micro-batches
    use_dynamic_bsz: bool = False
    ppo_max_token_len_per_gpu: Positive = 16384  # tokens, with use_dynamic_bsz
    shuffle: bool = False  # permutes groups between mini-batches
    data_loader_seed: int = 42
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None  # None: clip_ratio
    clip_ratio_high: float | None = None  # None: clip_ratio
    clip_ratio_c: float = 3.0
    loss_agg_mode: Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"] = "token-mean"
    entropy_coeff: float = 0.0
    grad_clip: float = 1.0
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    optim: OptimConfig = OptimConfig()


class LearnerConfig(Section, frozen=True):
    """The ranks that train."""

    ranks: Positive = 1
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # compute; master weights and reductions are float32
    num_threads: NonNegative = 0  # torch threads of a rank; 0: cores shared out evenly
    num_gpus_per_rank: float = 0.0
    max_consecutive_skips: Positive = 3
    step_timeout_s: Seconds = 1800.0  # one stage of a step; a rank hung in a collective ends the run by then


class WeightsConfig(Section, frozen=True):
    """Publication to the engines."""

    probe: bool = True  # compare the log-probs of a fixed prompt after every load
    probe_tolerance: float | None = None  # nats; None: 0.5 for bfloat16, 0.005 for float32
    publish_timeout_s: Seconds = 600.0
    max_unavailable: Positive | None = None  # replicas updated at once; None: half, at least one

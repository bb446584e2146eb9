"""Sections ``algorithm``, ``actor``, ``learner`` and ``weights``: from complete groups to a published version."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from streamrl.config.base import NonNegative, Positive, Seconds, Section, Share
from streamrl.config.checkpoint import CheckpointConfig
from streamrl.config.corrections import check_correction
from streamrl.config.estimators import check_estimator, check_gdpo
from streamrl.config.filter_groups import FilterGroups
from streamrl.config.losses import AggMode, check_actor, check_policy_loss


class RolloutCorrection(Section, frozen=True):
    """Off-policy correction between the policy that sampled and the one that trains. On by default."""

    rollout_is: Literal["token", "sequence"] | None = "token"  # level of the importance weights; None: no weights
    rollout_is_threshold: float | str = 2.0  # x: truncated above; "low_high": zero outside
    rollout_is_batch_normalize: bool = False  # divide the weights by their mean over the batch
    rollout_rs: str | None = None  # comma list of rejection rules; a token counts when all of them accept it
    rollout_rs_threshold: float | str | None = None  # one bound for all rules, or a comma list with one for each
    bypass_mode: bool = False  # the engine's log-probs are the old ones: no proximal forward pass
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"  # of bypass mode

    def __post_init__(self) -> None:
        check_correction(self)


class KLControl(Section, frozen=True):
    """The weight of the KL penalty in the reward: fixed, or steered towards a target."""

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: Annotated[float, msgspec.Meta(ge=0)] = 0.001  # the weight, or its first value
    target_kl: Annotated[float, msgspec.Meta(gt=0)] = 0.1  # adaptive
    horizon: Positive = 10000  # adaptive: trajectories over which a full correction acts


class AlgorithmConfig(Section, frozen=True):
    """Advantage estimation and correction; ``config/estimators.py`` lists which estimator reads which key."""

    adv_estimator: str = "grpo"  # a known name, or module.path:name
    norm_adv_by_std_in_grpo: bool = True
    gamma: Share = 1.0  # discount per model token
    lam: Share = 1.0  # gae
    group_stats: Literal["accepted", "all"] = "accepted"  # samples that enter mean, std and best-of
    multi_output: Literal["independent", "chain"] = "independent"  # outputs of a session: each by itself, or one stream
    gdpo_reward_keys: tuple[str, ...] | None = None  # reward components; required by gdpo
    gdpo_reward_weights: tuple[float, ...] | None = None  # None: 1 each
    f_norm: Annotated[float, msgspec.Meta(gt=0)] = 1.0  # gpg
    use_kl_in_reward: bool = False
    kl_penalty: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+"] = "kl"
    kl_ctrl: KLControl = KLControl()
    rollout_correction: RolloutCorrection = RolloutCorrection()
    min_group_size: Positive | None = None  # accepted samples; None: min(2, n), or 1 when the estimator compares no siblings
    filter_groups: FilterGroups = FilterGroups()

    def __post_init__(self) -> None:
        check_estimator(self.adv_estimator)
        check_gdpo(self.adv_estimator, self.gdpo_reward_keys, self.gdpo_reward_weights)


class PolicyLossConfig(Section, frozen=True):
    """Which policy loss, and the constants of single ones; ``config/losses.py`` lists which loss reads which."""

    loss_mode: str = "vanilla"  # a known name, or module.path:name
    dppo_truncation: float = 20.0  # dppo_tv, dppo_kl: bound of the detached ratio
    dro_beta: float = 0.0  # dro: weight of the quadratic penalty; must be set above 0
    clip_cov_ratio: float = 0.0002  # clip_cov: share of tokens without a gradient
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 0.0002  # kl_cov: share of penalised tokens
    ppo_kl_coef: float = 0.1

    def __post_init__(self) -> None:
        check_policy_loss(self)


class OptimConfig(Section, frozen=True):
    """AdamW and its schedule. The schedule advances once per update call."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    lr_warmup_steps: NonNegative = 0  # update calls
    lr_warmup_steps_ratio: Share = 0.0  # instead: their share of the total
    min_lr_ratio: float = 0.0


class ActorConfig(Section, frozen=True):
    """Policy update; names are verl's. Sizes count prompts unless the name says otherwise."""

    ppo_mini_batch_size: Positive = 256
    ppo_epochs: Positive = 1
    ppo_micro_batch_size_per_gpu: Positive | None = None  # trajectories; static micro-batches
    use_dynamic_bsz: bool = False
    ppo_max_token_len_per_gpu: Positive = 16384  # tokens that a micro-batch computes, with use_dynamic_bsz
    log_prob_max_token_len_per_gpu: Positive | None = None  # the same for passes without a gradient, the critic's too; None: as for updates
    shuffle: bool = False  # permutes groups between mini-batches
    data_loader_seed: int = 42
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None  # None: clip_ratio
    clip_ratio_high: float | None = None  # None: clip_ratio
    clip_ratio_c: float = 3.0
    tau_pos: float = 1.0  # sapo
    tau_neg: float = 1.05  # sapo
    loss_agg_mode: AggMode | None = None  # None: the loss's own, token-mean for most
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+"] = "low_var_kl"
    grad_clip: float = 1.0
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    optim: OptimConfig = OptimConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    def __post_init__(self) -> None:
        check_actor(self)


class RefConfig(Section, frozen=True):
    """The reference policy of a KL: frozen, on the learner ranks. It stays the starting model after a resume."""

    path: str | None = None  # None: model.path
    param_offload: bool | None = None  # its weights lie in the CPU's memory; None: learner.param_offload


class LearnerConfig(Section, frozen=True):
    """The ranks that train."""

    ranks: Positive = 1
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # compute; master weights and reductions are float32
    num_threads: NonNegative = 0  # torch threads of a rank; 0: cores shared out evenly
    num_gpus_per_rank: float = 0.0
    fsdp_size: int = -1  # ranks that share one copy of the weights, a divisor of ranks; -1: all of them
    reshard_after_forward: bool = True  # give a block's gathered weights back before its backward pass
    param_offload: bool = False  # weights, gradients and optimizer state lie in the CPU's memory, and the optimizer runs there
    optimizer_offload: bool = False  # optimizer state lies in the CPU's memory between steps
    shared_prompts: bool = True  # rows of a micro-batch with equal prompts compute them once; needs the packed layout of model.use_remove_padding
    workload_linear: Positive = 24576  # a row of l tokens costs this times l, plus l squared; a dense model of 7B parameters has this ratio
    sync_every_micro_batch: bool = False  # reduce gradients after every micro-batch: no rank holds a whole gradient
    max_consecutive_skips: Positive = 3
    step_timeout_s: Seconds = 1800.0  # one stage of a step; a rank hung in a collective ends the run by then


# nats, by the dtype of the rollout: two kernels agree to this on the mean of a row
PROBE_TOLERANCE_NATS = {"bfloat16": 0.5, "float32": 0.005}


class WeightsConfig(Section, frozen=True):
    """Publication to the engines."""

    probe: bool = True  # compare the log-probs of a fixed prompt after every load
    probe_tolerance: float | None = None  # nats; None: 0.5 for bfloat16, 0.005 for float32
    publish_timeout_s: Seconds = 600.0
    max_unavailable: Positive | None = None  # replicas updated at once; None: half, at least one

"""What a configuration trains for: which loss acts, which columns it takes, and the whole objective in one line.

The stages ask here, so that checks, learner, trainer and rollout agree on what runs. Knows names, not formulas.
"""

from __future__ import annotations

from streamrl.config.estimators import ESTIMATORS
from streamrl.config.losses import CLIP, POLICY_LOSSES, LossTraits, agg_mode
from streamrl.config.run import Config
from streamrl.config.training import ActorConfig, AlgorithmConfig

SEQUENCE_MODES = frozenset({"seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"})
_SCALES = {"grpo": "over group std", "grpo_vectorized": "over group std", "grpo_passk": "over group std", "gdpo": "each component over group std"}


def needed_columns(estimator: str) -> tuple[str, ...]:
    """What the estimator reads beyond rewards and mask; nothing is known of one of user code."""
    return ESTIMATORS[estimator].needs if estimator in ESTIMATORS else ()


def uses_reference(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Whether a KL compares the policy with the reference."""
    return algorithm.use_kl_in_reward or actor.use_kl_loss


def uses_critic(config: Config) -> bool:
    """Whether a critic is trained: as ``critic.enable`` says, else iff the estimator reads values."""
    return "values" in needed_columns(config.algorithm.adv_estimator) if config.critic.enable is None else config.critic.enable


def acting_loss(algorithm: AlgorithmConfig, actor: ActorConfig) -> str:
    """``actor.policy_loss.loss_mode``, but in bypass mode the section of the correction chooses."""
    return "bypass_mode" if algorithm.rollout_correction.bypass_mode else actor.policy_loss.loss_mode


def reads_rollout_log_probs(algorithm: AlgorithmConfig) -> bool:
    """Whether training, not only a metric, needs the engine's log-probs."""
    correction = algorithm.rollout_correction
    return correction.bypass_mode or correction.rollout_is is not None or correction.rollout_rs is not None


def makes_weights(algorithm: AlgorithmConfig) -> bool:
    """Whether the advantage stage writes importance weights; in bypass mode the loss makes its own."""
    return algorithm.rollout_correction.rollout_is is not None and not algorithm.rollout_correction.bypass_mode


def objective(config: Config) -> str:
    """Estimator, loss, aggregation, correction, KL, entropy and critic, in one line."""
    algorithm, actor = config.algorithm, config.actor
    parts = [_advantage(algorithm), _loss(algorithm, actor), _correction(algorithm), _kl(algorithm, actor)]
    if actor.entropy_coeff:
        parts.append(f"minus {actor.entropy_coeff:g} entropy")
    if uses_critic(config):
        parts.append(_critic(config))
    return "; ".join(parts)


def _advantage(algorithm: AlgorithmConfig) -> str:
    name = algorithm.adv_estimator
    options = ESTIMATORS[name].options if name in ESTIMATORS else frozenset()
    said = []
    if "norm_adv_by_std_in_grpo" in options:
        said.append(_SCALES[name] if algorithm.norm_adv_by_std_in_grpo else "not scaled by std")
    said += [f"{key} {getattr(algorithm, key):g}" for key in ("gamma", "lam", "f_norm") if key in options]
    if name == "gdpo":
        keys = algorithm.gdpo_reward_keys or ()
        said.append(" + ".join(f"{weight:g} {key}" for key, weight in zip(keys, algorithm.gdpo_reward_weights or [1.0] * len(keys), strict=True)))
    if "group_stats" in options and algorithm.group_stats == "all":
        said.append("statistics over all samples")
    if "multi_output" in options and algorithm.multi_output == "chain":
        said.append("outputs of a session as one stream")
    return f"{name} advantage ({', '.join(said)})" if said else f"{name} advantage"


def _loss(algorithm: AlgorithmConfig, actor: ActorConfig) -> str:
    name, correction = acting_loss(algorithm, actor), algorithm.rollout_correction
    options = POLICY_LOSSES.get(name, LossTraits()).options
    said: list[str] = []
    if name == "bypass_mode":
        said.append(correction.loss_type)
        options = options if correction.loss_type == "ppo_clip" else frozenset()
    if options & CLIP:
        low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
        high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
        said.append(f"clip [1 - {low:g}, 1 + {high:g}]")
    if "clip_ratio_c" in options:
        said.append(f"dual clip {actor.clip_ratio_c:g}")
    said += [f"{key} {getattr(actor, key):g}" for key in ("tau_pos", "tau_neg") if key in options]
    said += [f"{key} {getattr(actor.policy_loss, key):g}" for key in type(actor.policy_loss).__struct_fields__ if f"policy_loss.{key}" in options]
    return f"{agg_mode(actor)} of {name} loss ({', '.join(said)})" if said else f"{agg_mode(actor)} of {name} loss"


def _correction(algorithm: AlgorithmConfig) -> str:
    correction = algorithm.rollout_correction
    said = []
    if correction.rollout_is is not None:
        bound = correction.rollout_is_threshold
        how = f"zero outside of {bound}" if isinstance(bound, str) and "_" in bound else f"truncated at {float(bound):g}"
        said.append(f"{correction.rollout_is}-level importance weights {how}" + (", normalised" if correction.rollout_is_batch_normalize else ""))
    if correction.rollout_rs is not None:
        said.append(f"rejection by {correction.rollout_rs} at {correction.rollout_rs_threshold}")
    if correction.bypass_mode:
        said.append("bypass: the engine's log-probs are the old ones")
    return ", ".join(said) or "no off-policy correction"


def _kl(algorithm: AlgorithmConfig, actor: ActorConfig) -> str:
    said = []
    if algorithm.use_kl_in_reward:
        control = algorithm.kl_ctrl
        how = f"steered to {control.target_kl:g} from {control.kl_coef:g}" if control.type == "adaptive" else f"{control.kl_coef:g}"
        said.append(f"{algorithm.kl_penalty} KL in the reward ({how})")
    if actor.use_kl_loss:
        said.append(f"{actor.kl_loss_type} KL in the loss ({actor.kl_loss_coef:g})")
    return ", ".join(said) or "no KL"


def _critic(config: Config) -> str:
    critic, warmup = config.critic, config.trainer.critic_warmup
    alone = f", alone in the first {warmup} step{'s' if warmup > 1 else ''}" if warmup else ""
    return f"critic by {critic.loss_agg_mode} of the value loss (clip {critic.cliprange_value:g}), lr {critic.optim.lr:g}{alone}"

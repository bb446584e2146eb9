"""What each policy loss reads: the table by which a configuration refuses an option without effect. Knows names, not formulas.

A loss reads the keys of ``actor`` listed with it and no other; keys of ``actor.policy_loss`` stand with their section. Losses that are
registered by user code are unknown here: nothing is refused for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

AggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
AGG_MODES: tuple[str, ...] = get_args(AggMode)

CLIP = frozenset({"clip_ratio", "clip_ratio_low", "clip_ratio_high"})


@dataclass(frozen=True)
class LossTraits:
    """One loss. ``batch_dependent``: its selection of tokens covers the mini-batch, so the learner prepares it before the first micro-batch.
    ``scales_advantage``: the advantage is a factor of it, so a token without one has neither loss nor gradient."""

    options: frozenset[str] = frozenset()
    default_mode: str = "token-mean"  # when actor.loss_agg_mode is null
    fixed_mode: bool = False  # the formula says how it is aggregated; another actor.loss_agg_mode is refused
    batch_dependent: bool = False
    scales_advantage: bool = False


def _policy_loss(*names: str) -> frozenset[str]:
    return frozenset(f"policy_loss.{name}" for name in names)


POLICY_LOSSES: dict[str, LossTraits] = {
    "vanilla": LossTraits(CLIP | {"clip_ratio_c"}, scales_advantage=True),
    "dppo_tv": LossTraits(CLIP | _policy_loss("dppo_truncation"), scales_advantage=True),
    "dppo_kl": LossTraits(CLIP | _policy_loss("dppo_truncation"), scales_advantage=True),
    "gspo": LossTraits(CLIP, default_mode="seq-mean-token-mean", scales_advantage=True),
    "sapo": LossTraits(frozenset({"tau_pos", "tau_neg"}), default_mode="seq-mean-token-mean", fixed_mode=True, scales_advantage=True),
    "gpg": LossTraits(scales_advantage=True),
    "dro": LossTraits(_policy_loss("dro_beta")),
    "cispo": LossTraits(CLIP, scales_advantage=True),
    "clip_cov": LossTraits(CLIP | _policy_loss("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"), batch_dependent=True),
    "kl_cov": LossTraits(_policy_loss("kl_cov_ratio", "ppo_kl_coef"), batch_dependent=True),
    "geo_mean": LossTraits(CLIP, default_mode="seq-mean-token-mean", fixed_mode=True, scales_advantage=True),
    "bypass_mode": LossTraits(CLIP | {"clip_ratio_c"}),  # with loss_type ppo_clip; reinforce reads none
}


class LossKeys(Protocol):
    """Section ``actor.policy_loss`` as these checks read it."""

    @property
    def loss_mode(self) -> str: ...
    @property
    def dppo_truncation(self) -> float: ...
    @property
    def dro_beta(self) -> float: ...
    @property
    def clip_cov_ratio(self) -> float: ...
    @property
    def clip_cov_lb(self) -> float: ...
    @property
    def clip_cov_ub(self) -> float: ...
    @property
    def kl_cov_ratio(self) -> float: ...
    @property
    def ppo_kl_coef(self) -> float: ...


class ActorKeys(Protocol):
    """Section ``actor`` as these checks read it."""

    @property
    def loss_agg_mode(self) -> str | None: ...
    @property
    def tau_pos(self) -> float: ...
    @property
    def tau_neg(self) -> float: ...
    @property
    def policy_loss(self) -> LossKeys: ...


def agg_mode(actor: ActorKeys) -> str:
    """The aggregation that acts: ``actor.loss_agg_mode``, or what the loss itself says when that is null."""
    traits = POLICY_LOSSES.get(actor.policy_loss.loss_mode, LossTraits())
    return actor.loss_agg_mode or traits.default_mode


def idle_options(loss_mode: str, changed: set[str]) -> list[str]:
    """Those of the ``changed`` keys (``clip_ratio``, ``policy_loss.dro_beta``) that this loss never reads; empty for a loss of user code.

    >>> idle_options("gpg", {"clip_ratio", "grad_clip"})
    ['clip_ratio']
    """
    if loss_mode not in POLICY_LOSSES:
        return []
    every = frozenset[str]().union(*(traits.options for traits in POLICY_LOSSES.values()))
    return sorted((changed & every) - POLICY_LOSSES[loss_mode].options)


def check_policy_loss(keys: LossKeys) -> None:
    """A known loss (or ``module.path:name`` of user code) with constants its formula can work with."""
    name = keys.loss_mode
    if name not in POLICY_LOSSES and ":" not in name:
        raise ValueError(f"loss_mode must be one of {sorted(POLICY_LOSSES)} or 'module.path:name', got {name!r}; correct actor.policy_loss.loss_mode")
    if name == "dro" and not keys.dro_beta > 0:
        raise ValueError(f"dro needs a penalty above 0, got dro_beta={keys.dro_beta}; set actor.policy_loss.dro_beta")
    if name == "kl_cov" and not keys.ppo_kl_coef > 0:
        raise ValueError(f"kl_cov needs a penalty above 0, got ppo_kl_coef={keys.ppo_kl_coef}; set actor.policy_loss.ppo_kl_coef")
    rules = [
        ("dppo_truncation", keys.dppo_truncation, keys.dppo_truncation > 0, "above 0"),
        ("clip_cov_ratio", keys.clip_cov_ratio, 0 < keys.clip_cov_ratio <= 1, "above 0 and at most 1"),
        ("clip_cov_lb", keys.clip_cov_lb, keys.clip_cov_lb < keys.clip_cov_ub, f"below clip_cov_ub ({keys.clip_cov_ub})"),
        ("kl_cov_ratio", keys.kl_cov_ratio, 0 < keys.kl_cov_ratio <= 1, "above 0 and at most 1"),
    ]
    for key, value, holds, rule in rules:
        if not holds:
            raise ValueError(f"{key} must be {rule}, got {value}; correct actor.policy_loss.{key}")


def check_actor(keys: ActorKeys) -> None:
    """The loss's aggregation is one it has, and the temperatures of sapo divide."""
    name, mode = keys.policy_loss.loss_mode, keys.loss_agg_mode
    traits = POLICY_LOSSES.get(name, LossTraits())
    if traits.fixed_mode and mode not in (None, traits.default_mode):
        raise ValueError(f"{name} aggregates by {traits.default_mode} only, got loss_agg_mode={mode!r}; leave actor.loss_agg_mode null")
    if not (keys.tau_pos > 0 and keys.tau_neg > 0):
        raise ValueError(f"the temperatures of sapo are above 0, got tau_pos={keys.tau_pos}, tau_neg={keys.tau_neg}; correct actor.tau_pos or actor.tau_neg")

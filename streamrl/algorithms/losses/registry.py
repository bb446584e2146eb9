"""The dict of policy losses, and how their metrics combine; apart from the package so that a loss's file can register itself."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from streamrl.algorithms.registry import Registry

PolicyLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
LOSSES: Registry[PolicyLoss] = Registry("policy loss (actor.policy_loss.loss_mode)")
MAX_METRICS = frozenset({"ratio_max"})  # combine by maximum; every other loss metric is a share of the global mean, or a count, and adds up

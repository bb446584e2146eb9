"""The coefficient beta of the KL in the reward: constant, or steered towards a target (Ziegler et al. 2019, arXiv:1909.08593).

    beta *= 1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon

The state is one plain number, ``beta``; whoever owns the controller saves and restores it with the checkpoint. No torch here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from streamrl.config.training import KLControl

LARGEST_ERROR = 0.2  # one batch moves beta by at most this share of n / horizon


class KLController(Protocol):
    """``beta`` now; ``update`` after a batch of ``num_rows`` trajectories of mean divergence ``kl``."""

    beta: float

    def update(self, kl: float, num_rows: int) -> None: ...


@dataclass
class FixedKL:
    """beta never moves."""

    beta: float

    def update(self, kl: float, num_rows: int) -> None:
        """Nothing."""


@dataclass
class AdaptiveKL:
    """beta 0.001, target 0.1, horizon 10000: a batch of 256 with kl 0.3 gives 0.00100512."""

    beta: float
    target: float = 0.1
    horizon: int = 10000

    def __post_init__(self) -> None:
        if self.horizon <= 0 or self.target <= 0:
            raise ValueError(
                f"an adaptive KL needs target_kl and horizon above 0, got target_kl={self.target}, horizon={self.horizon}; correct algorithm.kl_ctrl"
            )

    def update(self, kl: float, num_rows: int) -> None:
        if not math.isfinite(kl):
            raise ValueError(f"the KL that steers beta is finite, got {kl}; look at ref_log_prob and old_log_probs of the batch")
        error = min(max(kl / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self.beta *= 1 + error * num_rows / self.horizon


def kl_controller(config: KLControl) -> KLController:
    """From section ``algorithm.kl_ctrl``."""
    return AdaptiveKL(config.kl_coef, config.target_kl, config.horizon) if config.type == "adaptive" else FixedKL(config.kl_coef)

"""``grpo`` under the name that elsewhere belongs to its fast form; here there is one form, and the numbers are the same."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from streamrl.algorithms.advantages.grpo import EPSILON, grpo
from streamrl.algorithms.advantages.registry import ESTIMATORS
from streamrl.config.training import AlgorithmConfig


@ESTIMATORS.register("grpo_vectorized")
def grpo_vectorized(
    token_level_rewards: Tensor, response_mask: Tensor, *, index: Any = None, config: AlgorithmConfig | None = None, epsilon: float = EPSILON, **columns: Any
) -> tuple[Tensor, Tensor]:
    """Scores 1, 0, 0.5 of one group give 0.999998, -0.999998, 0."""
    return grpo(token_level_rewards, response_mask, index=index, config=config, epsilon=epsilon, **columns)

"""Estimators as a user writes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamrl.algorithms import advantages


@advantages.register("tests_scaled")
def scaled(token_level_rewards: Tensor, response_mask: Tensor, *, index: Any = None, config: Any = None, **columns: Any) -> tuple[Tensor, Tensor]:
    """Twice the score, also where the mask is off; needs a column of its own."""
    result = token_level_rewards.sum(1, keepdim=True).expand(response_mask.shape) * 2 + columns.get("bonus", 0)
    return result, result


def not_finite(token_level_rewards: Tensor, response_mask: Tensor, *, index: Any = None, config: Any = None, **columns: Any) -> tuple[Tensor, Tensor]:
    return torch.full(response_mask.shape, torch.nan).masked_fill(response_mask.bool(), 0).index_fill(0, torch.tensor([1]), torch.inf), token_level_rewards


def one_column(token_level_rewards: Tensor, response_mask: Tensor, *, index: Any = None, config: Any = None, **columns: Any) -> tuple[Tensor, Tensor]:
    return token_level_rewards[:, :1], token_level_rewards


def no_pair(token_level_rewards: Tensor, response_mask: Tensor, *, index: Any = None, config: Any = None, **columns: Any) -> Tensor:
    return token_level_rewards

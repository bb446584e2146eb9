"""Optimal token baseline for answers with tool calls: the same as ``optimal_token_baseline``, with observations taken out first.

The position of a token is then its place among the model's tokens, so that answers with observations of different lengths are compared token by
token, and inserting observations changes nothing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from streamrl.algorithms.advantages.optimal_token_baseline import token_baseline
from streamrl.algorithms.advantages.registry import ESTIMATORS
from streamrl.algorithms.advantages.samples import samples_of
from streamrl.algorithms.advantages.streams import Streams
from streamrl.config.training import AlgorithmConfig


@ESTIMATORS.register("tir_optimal_token_baseline")
def tir_optimal_token_baseline(
    token_level_rewards: Tensor, response_mask: Tensor, *, index: Any = None, config: AlgorithmConfig | None = None, **columns: Any
) -> tuple[Tensor, Tensor]:
    """Two answers of one token, scores 1 and 0, w 1 and 3: B = 1 / 4, advantages .75 and -.25."""
    samples = samples_of(token_level_rewards, response_mask, index, config, columns, groups=True)
    streams = Streams.of(samples.tokens(response_mask, samples.counted_S), samples, chain=True)
    return token_baseline(token_level_rewards, response_mask, samples, streams, columns, "tir_optimal_token_baseline")

"""ReMax: the reward to go against the score of the greedy answer to the same prompt (Li et al. 2023, arXiv:2310.10505).

    returns_t = sum of r from t on     A = returns - reward_baselines     on model tokens

``reward_baselines`` [B] holds the greedy score of each row's prompt. Needs no siblings; nothing is whitened.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamrl.algorithms.advantages.placement import session_rewards
from streamrl.algorithms.advantages.registry import ESTIMATORS
from streamrl.algorithms.advantages.samples import need, samples_of
from streamrl.algorithms.advantages.streams import Streams, discounted_sum, is_chain
from streamrl.algorithms.masks import masked
from streamrl.config.training import AlgorithmConfig


@ESTIMATORS.register("remax")
def remax(
    token_level_rewards: Tensor, response_mask: Tensor, *, index: Any = None, config: AlgorithmConfig | None = None, **columns: Any
) -> tuple[Tensor, Tensor]:
    """r = [0, 1], baseline .25: returns [1, 1], advantages [.75, .75]."""
    baselines = columns.get("reward_baselines")
    if baselines is None or len(baselines) != len(response_mask):
        got = "none" if baselines is None else f"{len(baselines)} for {len(response_mask)} rows"
        raise ValueError(f"remax reads the greedy score of every row's prompt in reward_baselines, got {got}; pass them or choose another estimator")
    samples = samples_of(token_level_rewards, response_mask, index, config, columns, groups=False)
    rewards = session_rewards(token_level_rewards, response_mask, samples, columns.get("token_level_scores"), chain=is_chain(config))
    tokens = samples.tokens(response_mask, samples.accepted_S)
    streams = Streams.of(tokens, samples, chain=is_chain(config))
    returns = streams.unpack(discounted_sum(streams.pack(rewards), 1.0))
    baselines_BT = torch.as_tensor(baselines, dtype=returns.dtype, device=returns.device)[:, None].expand(returns.shape)
    return masked(returns - need({"reward_baselines": baselines_BT}, "reward_baselines", "remax", tokens), tokens), returns

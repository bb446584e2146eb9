"""Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438) on model tokens.

    delta_t = r_t + gamma V_(t+1) - V_t      A_t = delta_t + gamma lam A_(t+1)      returns = A + V, of A before whitening
    A := whiten(A) * m                       whitened over the accepted tokens of the batch

t + 1 is the next model token: observations between two turns change nothing, and what follows the last token is 0.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from streamrl.algorithms.advantages.placement import session_rewards
from streamrl.algorithms.advantages.registry import ESTIMATORS
from streamrl.algorithms.advantages.samples import need, samples_of
from streamrl.algorithms.advantages.streams import Streams, discounted_sum, is_chain
from streamrl.algorithms.whitening import whiten
from streamrl.config.training import AlgorithmConfig


@ESTIMATORS.register("gae")
def gae(
    token_level_rewards: Tensor, response_mask: Tensor, *, index: Any = None, config: AlgorithmConfig | None = None, **columns: Any
) -> tuple[Tensor, Tensor]:
    """r = [0, 0, 1], V = [.5, 9, .2], mask [1, 0, 1], lam .95: raw A [.46, -, .8], returns [.96, 0, 1], whitened [-.707107, 0, .707107]."""
    gamma, lam = (1.0, 1.0) if config is None else (config.gamma, config.lam)
    samples = samples_of(token_level_rewards, response_mask, index, config, columns, groups=False)
    rewards = session_rewards(token_level_rewards, response_mask, samples, columns.get("token_level_scores"), chain=is_chain(config))
    tokens = samples.tokens(response_mask, samples.accepted_S)
    values = need(columns, "values", "gae", tokens)
    streams = Streams.of(tokens, samples, chain=is_chain(config))
    rewards_NL, values_NL = streams.pack(rewards), streams.pack(values)
    delta_NL = rewards_NL - values_NL
    delta_NL[:, :-1].add_(values_NL[:, 1:], alpha=gamma)
    raw_NL = discounted_sum(delta_NL, gamma * lam)
    advantages, returns = streams.unpack(raw_NL), streams.unpack(raw_NL + values_NL)
    return whiten(advantages, tokens), returns

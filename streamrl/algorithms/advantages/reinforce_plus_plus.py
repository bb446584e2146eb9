"""REINFORCE++: discounted reward to go, scaled by the batch (Hu et al. 2025, arXiv:2501.03262).

    returns_t = r_t + gamma returns_(t+1)     A = whiten(returns) * m, over the accepted tokens of the batch

t + 1 is the next model token, so gamma applies once per model token and an observation never ends the carry.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from streamrl.algorithms.advantages.placement import session_rewards
from streamrl.algorithms.advantages.registry import ESTIMATORS
from streamrl.algorithms.advantages.samples import samples_of
from streamrl.algorithms.advantages.streams import Streams, discounted_sum, is_chain
from streamrl.algorithms.whitening import whiten
from streamrl.config.training import AlgorithmConfig


@ESTIMATORS.register("reinforce_plus_plus")
def reinforce_plus_plus(
    token_level_rewards: Tensor, response_mask: Tensor, *, index: Any = None, config: AlgorithmConfig | None = None, **columns: Any
) -> tuple[Tensor, Tensor]:
    """r = [0, 0, 1] with mask [1, 0, 1] and gamma .9: returns [.9, 0, 1]."""
    gamma = 1.0 if config is None else config.gamma
    samples = samples_of(token_level_rewards, response_mask, index, config, columns, groups=False)
    rewards = session_rewards(token_level_rewards, response_mask, samples, columns.get("token_level_scores"), chain=is_chain(config))
    tokens = samples.tokens(response_mask, samples.accepted_S)
    streams = Streams.of(tokens, samples, chain=is_chain(config))
    returns = streams.unpack(discounted_sum(streams.pack(rewards), gamma))
    return whiten(returns, tokens), returns

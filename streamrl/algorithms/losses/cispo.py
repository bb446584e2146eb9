"""CISPO: the ratio is clipped as a weight without a gradient, so every token keeps one (MiniMax 2025, arXiv:2506.13585).

L = -sg(clip(rho, 1 - lo, 1 + hi)) A pi
"""

from __future__ import annotations

from streamrl.algorithms.losses.tokens import Loss, Tokens, clip_range, policy_loss
from streamrl.config.training import ActorConfig


@policy_loss("cispo")
def cispo(tokens: Tokens, config: ActorConfig) -> Loss:
    """rho = 2, A = 1, pi = -1, hi = 0.2 gives 1.2."""
    low, high = clip_range(config)
    ratio = tokens.ratio.detach()
    clipped = ratio.clamp(1 - low, 1 + high)
    return Loss(-tokens.advantages * clipped * tokens.log_probs, ratio != clipped)

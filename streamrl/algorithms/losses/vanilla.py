"""PPO's clipped objective (Schulman et al. 2017, arXiv:1707.06347) with dual clip (Ye et al. 2020, arXiv:1912.09729).

    L = max(-A rho, -A clip(rho, 1 - lo, 1 + hi));  where A < 0 also L = min(L, -A c)

so a token with a negative advantage never pushes harder than ``c`` times.
"""

from __future__ import annotations

import torch

from streamrl.algorithms.losses.tokens import Loss, Tokens, clip_range, dual_clip, policy_loss
from streamrl.config.training import ActorConfig


@policy_loss("vanilla")
def vanilla(tokens: Tokens, config: ActorConfig) -> Loss:
    """With lo = hi = 0.2, c = 3: (rho, A) = (2, 1) gives -1.2, (5, -1) gives 3.0, (0.5, -1) gives 0.8."""
    (low, high), c = clip_range(config), dual_clip(config)
    gain = -tokens.advantages
    plain, clipped = gain * tokens.ratio, gain * tokens.ratio.clamp(1 - low, 1 + high)
    pessimistic = torch.maximum(plain, clipped)
    bound = torch.where(gain > 0, gain * c, torch.inf)
    return Loss(torch.minimum(pessimistic, bound), clipped > plain, pessimistic > bound)

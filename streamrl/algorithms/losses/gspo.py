"""GSPO: one ratio for the whole sequence, the geometric mean of its tokens' ratios (Zheng et al. 2025, arXiv:2507.18071).

    s_t = exp(sg(mean_t l) + pi_t - sg(pi_t)), its log capped at 10      L = max(-A s, -A clip(s, 1 - lo, 1 + hi))

The value of s is the sequence's, its gradient goes to each token. The mean runs over the row's own tokens. Aggregated by
seq-mean-token-mean unless a mode is given.
"""

from __future__ import annotations

import torch

from streamrl.algorithms.losses.tokens import Loss, Tokens, clip_range, policy_loss
from streamrl.config.training import ActorConfig

LOG_CAP = 10.0


@policy_loss("gspo")
def gspo(tokens: Tokens, config: ActorConfig) -> Loss:
    """Log-ratios 0.3 and 0.1 of a row give s = exp(0.2) on both tokens."""
    low, high = clip_range(config)
    mean_B1 = tokens.log_ratio.detach().sum(1, keepdim=True) / tokens.mask.sum(1, keepdim=True).clamp(min=1)
    straight = (tokens.log_probs - tokens.log_probs.detach()).nan_to_num(nan=0.0)  # value 0, also where pi is infinite
    ratio = (mean_B1 + straight).clamp(max=LOG_CAP).exp()
    gain = -tokens.advantages
    plain, clipped = gain * ratio, gain * ratio.clamp(1 - low, 1 + high)
    return Loss(torch.maximum(plain, clipped), clipped > plain)

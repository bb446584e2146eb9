"""SAPO: a sigmoid gate in the place of the clip, so that no token loses its gradient at once (arXiv:2511.20347).

    L = -A (4 / tau) sigmoid(tau (rho - 1))      tau = tau_pos if A > 0 else tau_neg

At rho = 1 the gradient is that of -A rho. Always aggregated by seq-mean-token-mean.
"""

from __future__ import annotations

import torch

from streamrl.algorithms.losses.tokens import Loss, Tokens, policy_loss
from streamrl.config.training import ActorConfig


@policy_loss("sapo")
def sapo(tokens: Tokens, config: ActorConfig) -> Loss:
    """rho = 2, A = 1, tau = 1 gives -2.924234."""
    tau = torch.where(tokens.advantages > 0, config.tau_pos, config.tau_neg).to(tokens.advantages.dtype)
    return Loss(-tokens.advantages * (4 / tau) * (tau * (tokens.ratio - 1)).sigmoid())

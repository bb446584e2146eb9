"""DRO: the policy gradient with a quadratic pull towards the old policy instead of a clip (Richemond et al. 2024, arXiv:2405.19107).

L = -(pi A - 0.5 beta l^2)      beta = dro_beta > 0
"""

from __future__ import annotations

from streamrl.algorithms.losses.tokens import Loss, Tokens, policy_loss
from streamrl.config.training import ActorConfig


@policy_loss("dro")
def dro(tokens: Tokens, config: ActorConfig) -> Loss:
    """beta = 0.5, A = 1, pi = -1, old = -1.5 gives 1.0625."""
    beta = config.policy_loss.dro_beta
    if not beta > 0:
        raise ValueError(f"dro needs a penalty above 0, got dro_beta={beta}; set actor.policy_loss.dro_beta")
    return Loss(0.5 * beta * tokens.bounded_log_ratio.square() - tokens.log_probs * tokens.advantages)

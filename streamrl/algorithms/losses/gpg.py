"""GPG: the plain policy gradient, no ratio and no clip (Chu et al. 2025, arXiv:2504.02546).

    L = -pi A

With importance weights w it is REINFORCE under the behaviour policy, -w pi A.
"""

from __future__ import annotations

from streamrl.algorithms.losses.tokens import Loss, Tokens, policy_loss
from streamrl.config.training import ActorConfig


@policy_loss("gpg")
def gpg(tokens: Tokens, config: ActorConfig) -> Loss:
    """A = 1, pi = -1 gives 1."""
    return Loss(-tokens.advantages * tokens.log_probs)

"""Log-probs and entropies of selected tokens. The vocabulary head runs at the positions that score them, not over prompts and padding.

Rows are right-padded and attention is causal, so no real token can see padding: no attention mask is needed or built. The log-prob of a
token comes from the output one position earlier, divided by the temperature it was sampled at, in float32.

Shapes: B rows, L tokens, N selected tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamrl.errors import ConfigError

CHUNK_TOKENS = 2048  # float32 logits alive at once: this times the vocabulary
_LOGIT_RESCALING = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # what some architectures do after the head


class Scored(NamedTuple):
    """Of the N selected tokens, each [N]; empty when it was not asked for."""

    log_probs: Tensor
    entropy: Tensor
    sum_pi_squared: Tensor


class TokenScorer(nn.Module):
    """A causal language model as a function from token ids to log-probs; the unit that is sharded."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        rescaled = [name for name in _LOGIT_RESCALING if getattr(policy.config, name, None) not in (None, 1, 1.0)]
        if rescaled:
            raise ConfigError(f"$.model.path: the learner reads the head's plain logits, got an architecture with {', '.join(rescaled)}; choose another model")
        self.policy = policy

    def forward(self, ids_BL: Tensor, rows_N: Tensor, columns_N: Tensor, temperature: float, with_entropy: bool, with_squares: bool) -> Scored:
        """Of the tokens after ``(rows, columns)``."""
        hidden_BLH = self.policy.get_decoder()(input_ids=ids_BL, use_cache=False).last_hidden_state
        hidden_NH = hidden_BLH[rows_N, columns_N]
        labels_N = ids_BL[rows_N, columns_N + 1]
        chunks = list(zip(hidden_NH.split(CHUNK_TOKENS), labels_N.split(CHUNK_TOKENS), strict=True))
        recompute = torch.is_grad_enabled() and len(chunks) > 1
        how = (temperature, with_entropy, with_squares)
        scored = [checkpoint(self._score, *chunk, *how, use_reentrant=False) if recompute else self._score(*chunk, *how) for chunk in chunks]
        return Scored(*(torch.cat(parts) for parts in zip(*scored, strict=True)))

    def _score(self, hidden_NH: Tensor, labels_N: Tensor, temperature: float, with_entropy: bool, with_squares: bool) -> Scored:
        logits_NV = self.policy.get_output_embeddings()(hidden_NH).float()
        if temperature != 1.0:
            logits_NV = logits_NV / temperature
        normaliser_N = logits_NV.logsumexp(-1)
        log_probs_N = logits_NV.gather(-1, labels_N[:, None]).squeeze(-1) - normaliser_N
        nothing = log_probs_N.new_empty(0)
        if not (with_entropy or with_squares):
            return Scored(log_probs_N, nothing, nothing)
        probs_NV = (logits_NV - normaliser_N[:, None]).exp()
        entropy_N = normaliser_N - (probs_NV * logits_NV).sum(-1) if with_entropy else nothing
        return Scored(log_probs_N, entropy_N, probs_NV.square().sum(-1) if with_squares else nothing)

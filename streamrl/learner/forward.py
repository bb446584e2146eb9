"""Log-probs and entropies of selected tokens. The vocabulary head runs at the positions that score them, not over prompts and padding.

The log-prob of a token comes from the output one position earlier, divided by the temperature it was sampled at, in float32. The head's products run in
the model's dtype, for as many tokens at a time as give ``CHUNK_LOGITS`` logits: memory grows with neither the vocabulary nor the sequence.

Shapes: N selected tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamrl.errors import ConfigError
from streamrl.learner.packing import Inputs
from streamrl.learner.token_statistics import TokenStatistics

CHUNK_LOGITS = 1 << 27  # 512 MiB in float32; smaller chunks add a gradient of the whole head more often
_LOGIT_RESCALING = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # what some architectures do after the head


class Scored(NamedTuple):
    """Of the N selected tokens, each [N]; empty when it was not asked for."""

    log_probs: Tensor
    entropy: Tensor
    sum_pi_squared: Tensor


def selected_hidden(policy: nn.Module, inputs: Inputs) -> Tensor:
    """What the model's last layer says where a selected token is scored, [N, H]: what a head reads."""
    packed = {} if inputs.packing is None else {"position_ids": inputs.positions, "packing": inputs.packing}
    hidden = policy.get_decoder()(input_ids=inputs.ids, use_cache=False, **packed).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, inputs.sources_N)


class TokenScorer(nn.Module):
    """A causal language model as a function from token ids to log-probs; the unit that is sharded."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        rescaled = [name for name in _LOGIT_RESCALING if getattr(policy.config, name, None) not in (None, 1, 1.0)]
        if rescaled:
            raise ConfigError(f"$.model.path: the learner reads the head's plain logits, got an architecture with {', '.join(rescaled)}; choose another model")
        self.policy = policy

    def forward(self, inputs: Inputs, temperature: float, with_entropy: bool, with_squares: bool) -> Scored:
        hidden_NH = selected_hidden(self.policy, inputs)
        size = max(1, CHUNK_LOGITS // self.policy.config.get_text_config().vocab_size)
        chunks = list(zip(hidden_NH.split(size), inputs.labels_N.split(size), strict=True))
        recompute = torch.is_grad_enabled() and len(chunks) > 1  # one chunk is within the bound as it is, and a second product costs a third of the head
        how = (temperature, with_entropy, with_squares)
        scored = [checkpoint(self._score, *chunk, *how, use_reentrant=False) if recompute else self._score(*chunk, *how) for chunk in chunks]
        return Scored(*(torch.cat(parts) for parts in zip(*scored, strict=True)))

    def _score(self, hidden_NH: Tensor, labels_N: Tensor, temperature: float, with_entropy: bool, with_squares: bool) -> Scored:
        logits_NV = self.policy.get_output_embeddings()(hidden_NH)
        return Scored(*TokenStatistics.apply(logits_NV, labels_N, temperature, with_entropy, with_squares))

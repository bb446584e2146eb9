"""The pass that gave a batch its old log-probs, kept with its graph until the update goes on from it: one forward pass a step instead of two.

Holds where a step has one optimizer step and one pass a rank, and nothing has been computed with the policy or moved it in between: then the update's own
log-probs are these very numbers, and the ratio of the two is 1 exactly. Costs no memory beyond the update's: what a pass keeps for its backward is kept
a few stages longer. What cannot go on from it computes a pass of its own, with the same result up to rounding.

Shapes: B rows, R response tokens of the longest, N selected tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from streamrl.learner.forward import Scored
from streamrl.learner.rows import MicroBatch


@dataclass(frozen=True)
class KeptPass:
    """``scored`` of the tokens that ``batch`` selected, not detached."""

    batch: MicroBatch
    scored: Scored

    def places_of(self, batch: MicroBatch) -> Tensor | None:
        """Where the tokens that ``batch`` selects lie in ``scored``, [N]; None when a row or a token was not scored.

        Scored were tokens 0 and 1 of row a, token 0 of row b. A batch of b and a that selects b's 0 and a's 1 finds them at 2 and 1.
        """
        row_of = {key: i for i, key in enumerate(self.batch.keys)}
        if not all(key in row_of for key in batch.keys) or not batch.keys:
            return None
        device = self.scored.log_probs.device
        rows_N, tokens_N = batch.selection
        width = next(iter(self.batch.columns.values())).shape[1]
        if int(tokens_N.max()) >= width:
            return None
        place_BR = torch.full((len(row_of), width), -1, device=device)
        place_BR[self.batch.selection] = torch.arange(len(self.scored.log_probs), device=device)
        places_N = place_BR[torch.tensor([row_of[key] for key in batch.keys], device=device)[rows_N], tokens_N]
        return places_N if bool((places_N >= 0).all()) else None

    def scored_at(self, places_N: Tensor) -> Scored:
        """Of these tokens, with their gradients."""
        return Scored(*(values[places_N] if len(values) else values for values in self.scored))

"""What is differentiated: the policy loss of the configuration, plus a KL to the reference, minus an entropy bonus, all over one mask.

Everything is normalised by the mini-batch's denominators, so the micro-batches of all ranks add up. In bypass mode rejection needs the current
policy, so it happens here and not in the advantage stage; ``kept`` then corrects for what the denominators could not know. Knows nothing of
gradients, steps or where columns come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from msgspec.structs import replace
from torch import Tensor

from streamrl.algorithms import corrections, kl, losses
from streamrl.algorithms.losses.tokens import Select
from streamrl.algorithms.masks import masked
from streamrl.config.losses import POLICY_LOSSES, LossTraits, agg_mode
from streamrl.config.objective import SEQUENCE_MODES, acting_loss, makes_weights
from streamrl.config.training import ActorConfig, AlgorithmConfig
from streamrl.learner.forward import Scored
from streamrl.learner.rows import MicroBatch

SELECTED = "selected"  # column of a batch-dependent loss: which tokens it chose in the whole mini-batch
_OBJECTIVES = frozenset({"pg_loss", "kl_loss"})  # metrics normalised like the loss; the rest are shares of tokens, or counts
_COUNTS = frozenset({"loss_tokens", "rejected_tokens", "kl_clamped_tokens", "computed_tokens", "kept_tokens", "kept_sequences"})


@dataclass(frozen=True)
class Denominators:
    """Of one mini-batch over all ranks. ``sequences`` counts sessions: a row is one divided by its session's rows."""

    tokens: float
    sequences: float


class Objective:
    """The loss of a micro-batch, for one configuration."""

    def __init__(self, actor: ActorConfig, algorithm: AlgorithmConfig, loss_scale_factor: float | None) -> None:
        name = acting_loss(algorithm, actor)
        self.loss = losses.get(name)
        self._actor = actor
        self._mode = agg_mode(actor)
        self._scale = loss_scale_factor
        self._rules = algorithm.rollout_correction if algorithm.rollout_correction.bypass_mode and algorithm.rollout_correction.rollout_rs else None
        self._call = self.loss
        if name == "bypass_mode":
            self._call = partial(self.loss, correction=replace(algorithm.rollout_correction, rollout_rs=None, rollout_rs_threshold=None))
        self.scales_advantage = POLICY_LOSSES.get(name, LossTraits()).scales_advantage and not actor.use_kl_loss and not actor.entropy_coeff
        self.fields = ["loss_mask", "old_log_probs", "advantages"]
        self.fields += ["rollout_is_weights"] if makes_weights(algorithm) else []
        self.fields += ["ref_log_prob"] if actor.use_kl_loss else []

    @property
    def with_entropy(self) -> bool:
        return self._actor.entropy_coeff != 0

    @property
    def select(self) -> Select | None:
        """Of a batch-dependent loss: what chooses its tokens in a whole mini-batch."""
        return getattr(self.loss, "select", None)

    @property
    def whole_mini_batch(self) -> bool:
        """Whether the loss must see a mini-batch at once: it depends on the batch, and says of no way to prepare that."""
        return bool(getattr(self.loss, "batch_dependent", False)) and self.select is None

    def __call__(self, batch: MicroBatch, scored: Scored, denominators: Denominators, ranks: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The micro-batch's part of the mini-batch loss, times the number of ranks (gradients are averaged over them), and its metrics."""
        columns, log_probs = batch.columns, batch.spread(scored.log_probs)
        mask = self._mask(columns["loss_mask"], log_probs, columns["old_log_probs"])
        aggregation: dict = {
            "dp_size": ranks,
            "batch_num_tokens": denominators.tokens,
            "global_batch_size": denominators.sequences,
            "loss_scale_factor": self._scale,
        }
        if batch.weights_B is not None:
            aggregation["row_weights"] = batch.weights_B
        loss, metrics = self._call(
            columns["old_log_probs"],
            log_probs,
            columns["advantages"],
            mask,
            loss_agg_mode=self._mode,
            config=self._actor,
            rollout_is_weights=columns.get("rollout_is_weights"),
            **aggregation,
            **({SELECTED: columns[SELECTED].bool()} if SELECTED in columns else {}),
        )
        metrics = metrics | {"pg_loss": loss.detach() / ranks}
        if self._actor.use_kl_loss:
            penalty, said = kl.kl_loss(log_probs, columns["ref_log_prob"], mask, self._actor.kl_loss_type, self._mode, **aggregation)
            loss = loss + self._actor.kl_loss_coef * penalty
            metrics |= said | {"kl_loss": penalty.detach() / ranks}
        if self.with_entropy:
            loss = loss - self._actor.entropy_coeff * losses.agg_loss(batch.spread(scored.entropy), mask, self._mode, **aggregation)
        return loss, metrics | self._kept(batch, mask)

    def _mask(self, loss_mask: Tensor, log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
        """In bypass mode without what its rejection rules reject: pi against mu, known only now."""
        if self._rules is None:
            return loss_mask
        accept = corrections.accepted(masked(log_probs - old_log_probs, loss_mask).detach(), loss_mask, self._rules)
        assert accept is not None
        return loss_mask.bool() & accept

    def _kept(self, batch: MicroBatch, mask: Tensor) -> dict[str, Tensor]:
        """What the rules of bypass mode left, in the units of the denominators."""
        if self._rules is None:
            return {}
        rows_B = mask.bool().any(1)
        weights_B = torch.ones_like(rows_B, dtype=torch.float64) if batch.weights_B is None else batch.weights_B
        return {"kept_tokens": mask.sum(), "kept_sequences": (weights_B * rows_B).sum()}

    def corrected(self, shares: dict[str, float], denominators: Denominators) -> tuple[float, dict[str, float]]:
        """(factor for the gradient, metrics): numerator and denominator use one mask, also when tokens were rejected behind the count. 0: none is left."""
        if self._rules is None:
            return 1.0, shares
        tokens, sequences = shares.pop("kept_tokens"), shares.pop("kept_sequences")
        shares["rejected_tokens"] += denominators.tokens - tokens
        if tokens == 0:
            return 0.0, shares
        by_token, by_row = denominators.tokens / tokens, denominators.sequences / sequences
        factor = {"token-mean": by_token, "token-sum": 1.0}.get(self._mode, by_row)
        scale = {name: factor if name in _OBJECTIVES else by_token for name in shares if name not in _COUNTS}
        return factor, {name: value * scale.get(name, 1.0) for name, value in shares.items()}


def counts_sessions(actor: ActorConfig) -> bool:
    """Whether the aggregation is one of sequences."""
    return agg_mode(actor) in SEQUENCE_MODES

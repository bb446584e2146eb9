"""What an update teaches the policy: the objective of the configuration, and for a loss that depends on its batch the tokens it chooses."""

from __future__ import annotations

from torch import Tensor

from streamrl.algorithms import losses
from streamrl.config.training import ActorConfig
from streamrl.errors import ConfigError
from streamrl.learner.engine import PolicyEngine
from streamrl.learner.monitor import UpdateMonitor
from streamrl.learner.objective import SELECTED, Denominators, Objective, counts_sessions
from streamrl.learner.passes import cost
from streamrl.learner.rows import MicroBatch, Rows
from streamrl.learner.selection import select_tokens

BACKWARD, FORWARD_AND_BACKWARD = 2, 3  # what a token costs


class PolicyLesson:
    """Implements ``Lesson`` for the policy."""

    name = "actor"

    def __init__(self, engine: PolicyEngine, actor: ActorConfig, objective: Objective, *, seed: int, has_one_update: bool = False) -> None:
        self._engine = engine
        self._actor = actor
        self._objective = objective
        self._seed = seed
        self._monitor = UpdateMonitor(actor)
        self._has_one_update = has_one_update  # in a step: old and new log-probs are the same, and no metric tells more of a row than its gradient
        self._is_only_pass = False
        self.fields = objective.fields
        self.counts_sessions = counts_sessions(actor)
        self.batching, self.optim = actor, actor.optim

    def begin(self) -> None:
        self._monitor = UpdateMonitor(self._actor)

    def prepare(self, rows: Rows, chosen: list[int], global_step: int, number: int) -> Rows:
        """With the tokens that a batch-dependent loss chooses, drawn by a generator of this very mini-batch."""
        if (select := self._objective.select) is None:
            return rows
        generator = losses.selection_generator(self._seed, global_step, number)
        return rows.with_column(SELECTED, select_tokens(self._engine, rows, chosen, self._actor, select, generator))

    def with_gradient(self, rows: Rows, chosen: list[int]) -> list[int]:
        """Rows without an advantage, such as those of a group whose answers all score alike, add nothing where the loss is a multiple of it. They are left out
        where computing the others anew is cheaper than going on from the pass that scored all of them."""
        if not (self._has_one_update and self._objective.scales_advantage):
            return chosen
        moving = [i for i in chosen if bool(rows.columns["advantages"].row(i)[rows.columns["loss_mask"].row(i) > 0].any())]
        few, whole = self._engine.comm.sum([cost(self._engine, rows, moving), cost(self._engine, rows, chosen)])
        if FORWARD_AND_BACKWARD * few >= BACKWARD * whole:
            return chosen
        self._engine.forget()
        return moving or chosen[:1]

    def check_parts(self, num_parts: int) -> None:
        """A loss that depends on its batch and prepares nothing must see the mini-batch at once."""
        self._is_only_pass = num_parts == 1
        ranks = self._engine.comm.ranks
        if self._objective.whole_mini_batch and num_parts * ranks > 1:
            raise ConfigError(
                f"$.actor.policy_loss.loss_mode: {self._actor.policy_loss.loss_mode} depends on its batch and has no select, so it must see a mini-batch at "
                f"once, got {num_parts} micro-batches on {ranks} ranks; use one rank, actor.use_dynamic_bsz and an actor.ppo_max_token_len_per_gpu that holds "
                "it, or give the loss a select"
            )

    def loss(self, batch: MicroBatch, denominators: Denominators) -> tuple[Tensor, dict[str, Tensor]]:
        score = self._engine.score_or_go_on if self._is_only_pass else self._engine.score
        scored = score(batch, with_entropy=self._objective.with_entropy)
        loss, metrics = self._objective(batch, scored, denominators, self._engine.comm.ranks)
        self._monitor.add(batch, scored.log_probs)
        return loss, metrics

    def corrected(self, shares: dict[str, float], denominators: Denominators) -> tuple[float, dict[str, float]]:
        return self._objective.corrected(shares, denominators)

    def metrics(self) -> dict[str, float]:
        return self._monitor.metrics(self._engine.comm)

"""The critic: a value for every response token, from a model of its own on the same ranks, and what an update teaches it.

V_t is the output of a linear head at the position before token t, as the log-prob of t is; float32 outside of the model. The head begins at 0, so all
values do, whatever the number of ranks: the first advantages are those of an estimator without a baseline. The backbone begins as ``critic.path``,
without its vocabulary head.
"""

from __future__ import annotations

from torch import Tensor, nn

from streamrl.algorithms.losses import value_loss
from streamrl.config.batching import MicroBatching
from streamrl.config.critic import CriticConfig
from streamrl.config.objective import SEQUENCE_MODES
from streamrl.config.training import LearnerConfig
from streamrl.learner.comm import Comm
from streamrl.learner.engine import TrainableModel
from streamrl.learner.forward import selected_hidden
from streamrl.learner.loading import Pretrained
from streamrl.learner.objective import Denominators
from streamrl.learner.packing import Inputs
from streamrl.learner.rows import MicroBatch, Rows
from streamrl.learner.scoring import Columns, token_columns


class TokenValuer(nn.Module):
    """A language model as a function from token ids to values; the unit that is sharded."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        policy.set_output_embeddings(nn.Identity())
        self.policy = policy
        self.head = nn.Linear(policy.config.get_text_config().hidden_size, 1)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)

    def forward(self, inputs: Inputs) -> Tensor:
        """Of the selected tokens, [N, 1]: FSDP wants no view."""
        return self.head(selected_hidden(self.policy, inputs)).float()


class Critic(TrainableModel):
    """A trainable model that values tokens."""

    def __init__(self, pretrained: Pretrained, critic: CriticConfig, learner: LearnerConfig, comm: Comm) -> None:
        super().__init__(TokenValuer(pretrained.model), pretrained, critic.optim, critic.grad_clip, learner, comm)

    def values(self, batch: MicroBatch) -> Tensor:
        """Of the micro-batch's selected tokens under the current weights, [N]."""
        return self.module(batch.inputs).squeeze(-1)


def value_rows(critic: Critic, rows: Rows, batching: MicroBatching) -> Columns:
    """Column ``values``: a number for every token that the policy wrote, 0.0 on observations."""
    return token_columns(lambda batch: {"values": critic.values(batch)}, ["values"], critic, rows, batching, list(range(len(rows))))


class CriticLesson:
    """Implements ``Lesson`` for the critic: the clipped value loss towards the returns."""

    name = "critic"
    fields = ["loss_mask", "values", "returns"]

    def __init__(self, model: Critic, critic: CriticConfig, batching: MicroBatching, loss_scale_factor: float | None) -> None:
        self._model = model
        self._config = critic
        self._scale = loss_scale_factor
        self.counts_sessions = critic.loss_agg_mode in SEQUENCE_MODES
        self.batching, self.optim = batching, critic.optim

    def begin(self) -> None:
        pass

    def prepare(self, rows: Rows, chosen: list[int], global_step: int, number: int) -> Rows:
        return rows

    def with_gradient(self, rows: Rows, chosen: list[int]) -> list[int]:
        return chosen

    def check_parts(self, num_parts: int) -> None:
        pass

    def loss(self, batch: MicroBatch, denominators: Denominators) -> tuple[Tensor, dict[str, Tensor]]:
        """With ``vf_loss`` and ``vf_clipfrac``, and ``vpred_mean``: the values' mean over the mini-batch's tokens."""
        columns, ranks = batch.columns, self._model.comm.ranks
        predicted = batch.spread(self._model.values(batch))
        loss, metrics = value_loss(
            predicted,
            columns["returns"],
            columns["values"],
            columns["loss_mask"],
            cliprange_value=self._config.cliprange_value,
            loss_agg_mode=self._config.loss_agg_mode,
            dp_size=ranks,
            batch_num_tokens=denominators.tokens,
            global_batch_size=denominators.sequences,
            loss_scale_factor=self._scale,
            row_weights=batch.weights_B,
        )
        mean = (predicted * columns["loss_mask"]).sum() / denominators.tokens
        return loss, metrics | {"vf_loss": loss / ranks, "vpred_mean": mean}

    def corrected(self, shares: dict[str, float], denominators: Denominators) -> tuple[float, dict[str, float]]:
        return 1.0, shares

    def metrics(self) -> dict[str, float]:
        return {}

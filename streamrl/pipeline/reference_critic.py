"""The critic of the synchronous oracle: a decoder, a linear head that begins at 0, and the clipped value loss, in plain torch. See ``reference.py``.

Mini-batches are taken in batch order: of several ones ``critic.shuffle`` must be off to compare.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from streamrl.algorithms import losses
from streamrl.config import Config
from streamrl.config.batching import critic_batching
from streamrl.pipeline.reference_batch import tensors_of
from streamrl.protocol import DataProto


class ReferenceCritic:
    """Values [B, MR] of response tokens, and their update."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._batching = critic_batching(config.critic, config.actor)
        self.decoder = AutoModelForCausalLM.from_pretrained(config.critic.path or config.model.path, dtype=torch.float32).get_decoder()
        self.head = nn.Linear(self.decoder.config.hidden_size, 1)
        self._parameters = [*self.decoder.parameters(), *self.head.parameters()]
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)
        optim = config.critic.optim
        self._optimizer = torch.optim.AdamW(self._parameters, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay)

    def values(self, batch: DataProto) -> Tensor:
        """The output at t - 1 values token t."""
        columns = tensors_of(batch)
        width = columns["responses"].shape[1]
        inputs = {name: columns[name] for name in ("input_ids", "attention_mask", "position_ids")}
        return cast(Tensor, self.head(self.decoder(**inputs).last_hidden_state[:, -width - 1 : -1])).squeeze(-1)

    @torch.no_grad()
    def valued(self, batch: DataProto) -> DataProto:
        """Column ``values``, before the update."""
        return DataProto.from_dict(tensors={"values": self.values(batch)})

    def update(self, batch: DataProto) -> float:
        """Epochs over mini-batches of whole groups; the mean value loss of the optimizer steps."""
        critic, found = self._config.critic, []
        for _ in range(self._batching.ppo_epochs):
            for part in batch.split(self._batching.ppo_mini_batch_size * self._config.rollout.n):
                columns = tensors_of(part)
                loss, _ = losses.value_loss(
                    self.values(part),
                    columns["returns"],
                    columns["values"],
                    columns["loss_mask"],
                    cliprange_value=critic.cliprange_value,
                    loss_agg_mode=critic.loss_agg_mode,
                    loss_scale_factor=float(self._config.data.max_response_length),
                )
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self._parameters, critic.grad_clip)
                self._optimizer.step()
                self._optimizer.zero_grad()
                found.append(float(loss.detach()))
        return sum(found) / len(found)

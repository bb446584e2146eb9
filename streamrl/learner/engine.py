"""A sharded model that learns: gradients, clipping, AdamW, and its tensors under their Hugging Face names.

Master weights, optimizer state, gradients' reductions and the gradient norm are float32. Guarantees: an optimizer step happens on all ranks or on
none, and only with a finite gradient norm. Knows nothing of batches, losses or versions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from streamrl.config.training import ActorConfig, LearnerConfig, OptimConfig
from streamrl.learner.comm import Comm
from streamrl.learner.forward import Scored, TokenScorer
from streamrl.learner.kept_pass import KeptPass
from streamrl.learner.loading import Pretrained, fill
from streamrl.learner.lora import Adapters
from streamrl.learner.packing import layout_of
from streamrl.learner.rows import MicroBatch
from streamrl.learner.sharding import local, shard, shard_device, shards, whole


class TrainableModel:
    """A sharded module with AdamW: backward and optimizer steps of one rank. Every method is a collective.

    ``module`` computes something from a Hugging Face model that it holds under the attribute ``prefix``; names of tensors are without it.
    """

    def __init__(
        self, module: nn.Module, pretrained: Pretrained, optim: OptimConfig, grad_clip: float, learner: LearnerConfig, comm: Comm, *, prefix: str = "policy."
    ) -> None:
        self.comm = comm
        self.config = pretrained.model.config
        self.layout = layout_of(pretrained.model, learner)
        self._grad_clip = grad_clip
        self._learner = learner
        self._copies = comm.ranks // shards(learner, comm.ranks)  # of each shard
        self._state_device = torch.device("cpu") if learner.optimizer_offload else shard_device(learner, comm)  # between steps
        self._prefix = prefix
        self.module = shard(module, learner, comm)
        fill(self.module, pretrained, prefix, shard_device(learner, comm))
        self._shards = {name.removeprefix(prefix): parameter for name, parameter in self.module.named_parameters()}  # a tied one once
        self.parameters = {name: parameter for name, parameter in self._shards.items() if parameter.requires_grad}
        assert all(parameter.dtype is torch.float32 for parameter in self.parameters.values()), "small updates would vanish in coarser weights"
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True)
        for parameter in self.parameters.values():  # made now, so that saving and loading see one layout before and after the first step
            moments = {name: torch.zeros_like(parameter, device=self._state_device) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.zeros((), dtype=torch.float32, device=self._state_device)} | moments

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a micro-batch; ranks exchange gradients on the last one only, unless whole gradients need too much memory."""
        self.module.set_requires_gradient_sync(last or self._learner.sync_every_micro_batch)
        loss.backward()

    def scale_gradients(self, factor: float) -> None:
        """Multiply what was added up so far; 0 forgets it."""
        if factor == 0.0:
            self.optimizer.zero_grad(set_to_none=True)
        elif factor != 1.0:
            torch._foreach_mul_(self._local_gradients(), factor)

    def step(self, learning_rate: float) -> float | None:
        """Clip and apply the gradients; the norm before clipping. None: the norm is not finite, nothing moved. Gradients are zero after."""
        norm = self._gradient_norm()
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            return None
        scale = self._grad_clip / (norm + 1e-6)
        if scale < 1.0:
            torch._foreach_mul_(self._local_gradients(), scale)
        self.reshard()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self._move_state(shard_device(self._learner, self.comm))
        self.optimizer.step()
        self._move_state(self._state_device)
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _move_state(self, device: torch.device) -> None:
        for state in self.optimizer.state.values():
            for name, tensor in state.items():
                state[name] = tensor.to(device)

    def reshard(self) -> None:
        """Drop gathered copies of the weights; none may outlive a change of the shards (an optimizer step, a loaded checkpoint)."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _local_gradients(self) -> list[Tensor]:
        return [local(parameter.grad) for parameter in self.parameters.values() if parameter.grad is not None]

    def _gradient_norm(self) -> float:
        """Over all parameters of all ranks, with one reduction: the shards of a copy are disjoint, so their squares add up."""
        gradients = self._local_gradients()
        square = torch.nn.utils.get_total_norm(gradients).double() ** 2 if gradients else torch.zeros((), dtype=torch.float64)
        return math.sqrt(total / self._copies) if (total := self.comm.sum(square.reshape(1))[0]) >= 0 else math.nan

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What training changes, under Hugging Face names and sharded as it lies here: parameters and saved buffers, a tied tensor once. On a frozen
        base only what is trained."""
        yield from ((name, parameter.detach()) for name, parameter in self.parameters.items())
        if len(self.parameters) < len(self._shards):
            return
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        yield from ((name.removeprefix(self._prefix), tensor) for name, tensor in self.module.state_dict().items() if name not in parameters)

    def full_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The whole tensors of ``named_tensors``, one after another in one order on all ranks."""
        yield from ((name, whole(tensor, dtype)) for name, tensor in self.named_tensors())

    def weights_are_finite(self) -> bool:
        """On all ranks."""
        bad = sum(not bool(torch.isfinite(local(p)).all()) for p in self.parameters.values())
        return self.comm.sum([bad])[0] == 0


class PolicyEngine(TrainableModel):
    """The policy: a trainable model that scores tokens."""

    def __init__(self, pretrained: Pretrained, actor: ActorConfig, learner: LearnerConfig, comm: Comm, temperature: float) -> None:
        super().__init__(TokenScorer(pretrained.model), pretrained, actor.optim, actor.grad_clip, learner, comm)
        self._temperature = temperature
        self.adapters = Adapters(self.module, self._shards, comm) if len(self.parameters) < len(self._shards) else None
        self._kept: KeptPass | None = None

    def score(self, batch: MicroBatch, *, with_entropy: bool = False, with_squares: bool = False, temperature: float | None = None) -> Scored:
        """The micro-batch's selected tokens under the current weights; None: the rollout's temperature."""
        self._kept = None
        return self.module(batch.inputs, self._temperature if temperature is None else temperature, with_entropy, with_squares)

    def score_and_keep(self, batch: MicroBatch, *, with_entropy: bool = False, with_squares: bool = False) -> Scored:
        """The same, kept for an update that may go on from it, until the policy is used or moved otherwise. What is returned has no gradient."""
        with torch.enable_grad():
            scored = self.score(batch, with_entropy=with_entropy, with_squares=with_squares)
        self._kept = KeptPass(batch, scored)
        return Scored(*(values.detach() for values in scored))

    def score_or_go_on(self, batch: MicroBatch, *, with_entropy: bool = False) -> Scored:
        """``score`` of an update's only pass: from the kept one where every rank has one that scored these tokens. A collective."""
        kept, self._kept = self._kept, None
        places_N = None if kept is None else kept.places_of(batch)
        if self.comm.sum([float(places_N is None)])[0]:
            return self.score(batch, with_entropy=with_entropy)
        assert kept is not None and places_N is not None
        return kept.scored_at(places_N)

    def forget(self) -> None:
        """Keep no pass."""
        self._kept = None

    def reshard(self) -> None:
        self.forget()
        super().reshard()

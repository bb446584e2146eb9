"""The sharded policy and its optimizer: FSDP2 on every device, gloo on CPU and NCCL on GPU, also with one rank.

Master weights, optimizer state, gradients' reductions and the gradient norm are float32; compute runs in ``learner.dtype``. Guarantees: an
optimizer step happens on all ranks or on none, and only with a finite gradient norm. Knows nothing of batches, losses or versions.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from streamrl.config.rollout import ModelConfig
from streamrl.config.training import ActorConfig, LearnerConfig
from streamrl.errors import ConfigError
from streamrl.learner.comm import Comm
from streamrl.learner.forward import Scored, TokenScorer
from streamrl.learner.rows import MicroBatch

log = logging.getLogger(__name__)

_PREFIX = "policy."  # TokenScorer holds the model under this name; Hugging Face names are without it


def choose_device(learner: LearnerConfig) -> torch.device:
    """The rank's GPU when it owns one, else the CPU."""
    if learner.num_gpus_per_rank == 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"$.learner.num_gpus_per_rank: torch must see a GPU, got {learner.num_gpus_per_rank} with none visible; set 0 to train on the CPU")
    torch.cuda.set_device(0)  # the host shows a rank its own devices only
    return torch.device("cuda", 0)


def load_policy(model: ModelConfig, path: str | None = None, key: str = "model.path") -> nn.Module:
    """The causal language model of ``model``, or that at ``path``, in float32. Dropout is off: a token's old and new log-prob must come from one function."""
    from transformers import AutoModelForCausalLM

    path = path or model.path
    try:
        policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"$.{key}: must be a Hugging Face folder or hub id of a causal language model, got {path!r} ({error}); correct it") from error
    return policy.eval()


class PolicyEngine:
    """Forward, backward and optimizer steps of one rank. Every method is a collective."""

    def __init__(self, policy: nn.Module, actor: ActorConfig, learner: LearnerConfig, comm: Comm, temperature: float) -> None:
        self.comm = comm
        self.config = policy.config
        self._grad_clip = actor.grad_clip
        self.scorer = shard(TokenScorer(policy), learner, comm)
        self._temperature = temperature
        self.parameters = {name.removeprefix(_PREFIX): parameter for name, parameter in self.scorer.named_parameters()}  # a tied one once
        optim = actor.optim
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True)
        for parameter in self.parameters.values():  # made now, so that saving and loading see one layout before and after the first step
            step = torch.zeros((), dtype=torch.float32, device=comm.device)
            self.optimizer.state[parameter] = {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}

    def score(self, batch: MicroBatch, *, with_entropy: bool = False, with_squares: bool = False, temperature: float | None = None) -> Scored:
        """The micro-batch's selected tokens under the current weights; None: the rollout's temperature."""
        rows_N, columns_N = batch.positions_N()
        return self.scorer(batch.ids_BL, rows_N, columns_N, self._temperature if temperature is None else temperature, with_entropy, with_squares)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a micro-batch; ranks exchange gradients on the last one only."""
        self.scorer.set_requires_gradient_sync(last)
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
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def reshard(self) -> None:
        """Drop gathered copies of the weights; none may outlive a change of the shards (an optimizer step, a loaded checkpoint)."""
        for module in self.scorer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _local_gradients(self) -> list[Tensor]:
        return [local(parameter.grad) for parameter in self.parameters.values() if parameter.grad is not None]

    def _gradient_norm(self) -> float:
        """Over all parameters of all ranks, with one reduction: shards are disjoint, so their squares add up."""
        gradients = self._local_gradients()
        square = torch.nn.utils.get_total_norm(gradients).double() ** 2 if gradients else torch.zeros((), dtype=torch.float64)
        return math.sqrt(total) if (total := self.comm.sum(square.reshape(1))[0]) >= 0 else math.nan

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and saved buffers under their Hugging Face names, sharded as they lie here; a tied tensor once."""
        yield from ((name, parameter.detach()) for name, parameter in self.parameters.items())
        parameters = dict(self.scorer.named_parameters(remove_duplicate=False))
        yield from ((name.removeprefix(_PREFIX), tensor) for name, tensor in self.scorer.state_dict().items() if name not in parameters)

    def full_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors, one after another in one order on all ranks; cast before they are gathered, so that half the bytes travel."""
        for name, tensor in self.named_tensors():
            cast = tensor.to(dtype) if tensor.is_floating_point() else tensor
            yield name, cast.full_tensor() if isinstance(cast, DTensor) else cast

    def weights_are_finite(self) -> bool:
        """On all ranks."""
        bad = sum(not bool(torch.isfinite(local(p)).all()) for p in self.parameters.values())
        return self.comm.sum([bad])[0] == 0


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard(scorer: TokenScorer, learner: LearnerConfig, comm: Comm, *, keep_root: bool = True) -> FSDPModule:
    """Each transformer block is one unit of gathering, the rest (embeddings, last norm, head) is the root's, which a backward pass needs again."""
    mesh = init_device_mesh(comm.device.type, (comm.ranks,))
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, learner.dtype), reduce_dtype=torch.float32)
    again = comm.ranks > 1  # with one rank there is nothing to give back between forward and backward
    block_names = set(getattr(scorer.policy, "_no_split_modules", None) or ())
    for module in list(scorer.policy.modules()):
        if type(module).__name__ in block_names:
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
    return fully_shard(scorer, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep_root)

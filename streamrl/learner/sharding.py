"""How a model is spread over the learner ranks: FSDP2 on every device, also with one rank.

Each rank keeps 1 / ``learner.fsdp_size`` of every weight, of its gradient and of its optimizer state, and gathers one transformer block at a time to
compute with it. Gradients are averaged over all ranks in float32; compute runs in ``learner.dtype``. Knows nothing of what the module computes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from streamrl.config.training import LearnerConfig
from streamrl.errors import ConfigError
from streamrl.learner.comm import Comm


def choose_device(learner: LearnerConfig) -> torch.device:
    """The rank's GPU when it owns one, else the CPU."""
    if learner.num_gpus_per_rank == 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"$.learner.num_gpus_per_rank: torch must see a GPU, got {learner.num_gpus_per_rank} with none visible; set 0 to train on the CPU")
    torch.cuda.set_device(0)  # the host shows a rank its own devices only
    return torch.device("cuda", 0)


def shard(module: nn.Module, learner: LearnerConfig, comm: Comm, *, keep_root: bool = True) -> FSDPModule:
    """Each transformer block is one unit of gathering, the rest (embeddings, last norm, head) is the root's, which a backward pass needs again."""
    size = shards(learner, comm.ranks)
    names, shape = (("shard",), (size,)) if size == comm.ranks else (("replicate", "shard"), (comm.ranks // size, size))
    how: dict[str, Any] = {
        "mesh": init_device_mesh(comm.device.type, shape, mesh_dim_names=names),
        "mp_policy": MixedPrecisionPolicy(param_dtype=getattr(torch, learner.dtype), reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=comm.device.type == "cuda") if learner.param_offload else OffloadPolicy(),
    }
    again = size > 1 and learner.reshard_after_forward  # one shard: there is nothing to give back between forward and backward
    for block in blocks(module):
        fully_shard(block, reshard_after_forward=again, **how)
    return fully_shard(module, reshard_after_forward=not keep_root, **how)


def shards(learner: LearnerConfig, ranks: int) -> int:
    """How many ranks share one copy of the weights."""
    return ranks if learner.fsdp_size == -1 else learner.fsdp_size


def shard_device(learner: LearnerConfig, comm: Comm) -> torch.device:
    """Where the shards lie."""
    return torch.device("cpu") if learner.param_offload else comm.device


def checkpoint_activations(model: nn.Module) -> None:
    """Keep a block's input only and compute the rest again when its gradient is wanted."""
    if not (found := blocks(model)):
        raise ConfigError(f"$.model.enable_gradient_checkpointing: needs a model that names its blocks, got a {type(model).__name__}; set it to false")
    for block in found:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def blocks(module: nn.Module) -> list[nn.Module]:
    """The transformer blocks, by the class names that its Hugging Face models give."""
    names = {name for inner in module.modules() for name in getattr(inner, "_no_split_modules", None) or ()}
    return [inner for inner in module.modules() if type(inner).__name__ in names]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor of all ranks, in ``dtype`` when it is one of floats: cast before it is gathered, so that fewer bytes travel. A collective."""
    cast = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return cast.to(cast.device_mesh.device_type).full_tensor() if isinstance(cast, DTensor) else cast

"""Low-rank adapters of a policy: ``y = W x + b + scaling · B A x`` with W and b frozen, A and B trained.

An adapted layer keeps the names of its base (``….q_proj.weight``) and adds ``….q_proj.lora_A.weight`` and ``….q_proj.lora_B.weight``, so that a frozen
tensor is called the same with and without adapters. A starts as a function of the run's seed and the layer's name, on every number of ranks, and B as
zero: version 0 is the base. Doesn't know how adapters travel or are merged (``weights.adapter``).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from streamrl.config.rollout import ModelConfig
from streamrl.learner.comm import Comm
from streamrl.learner.sharding import whole
from streamrl.protocol.weights import AdapterRecord
from streamrl.weights.adapter import adapted_layers, base_digest

_DIGEST_WORDS = 4  # a digest of 16 bytes as numbers that float64 holds exactly


class LoraLinear(nn.Linear):
    """A frozen linear layer with an adapter; takes over the tensors of ``base``."""

    def __init__(self, base: nn.Linear, rank: int, scaling: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.rank, self.scaling, self.active = rank, scaling, True
        self.lora_A = nn.utils.skip_init(nn.Linear, self.in_features, rank, bias=False)
        self.lora_B = nn.utils.skip_init(nn.Linear, rank, self.out_features, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        return out + self.scaling * self.lora_B(self.lora_A(input)) if self.active else out


def attach(model: nn.Module, config: ModelConfig, seed: int, dtype: torch.dtype) -> None:
    """Freeze ``model`` in ``dtype`` and give the layers that ``config`` names float32 adapters. The model may have no memory yet, its adapters have.
    Nothing with ``lora_rank`` 0."""
    if config.lora_rank == 0:
        return
    layers = adapted_layers(model, config)
    for parameter in model.requires_grad_(False).parameters():
        parameter.data = parameter.data.to(dtype)
    for name in layers:
        base = cast(nn.Linear, model.get_submodule(name))
        model.set_submodule(name, LoraLinear(base, config.lora_rank, config.lora_alpha / config.lora_rank))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(start_value(seed, name, tuple(parameter.shape)))


def start_value(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Of an adapter tensor: B is zero, A uniform as a linear layer's own weights."""
    if name.endswith("lora_B.weight"):
        return torch.zeros(shape)
    number = int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest(), "little")
    return nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=torch.Generator().manual_seed(number))


class Adapters:
    """The adapters of a sharded policy and the frozen base below them. ``shards``: all parameters of the policy by name."""

    def __init__(self, module: nn.Module, shards: Mapping[str, nn.Parameter], comm: Comm) -> None:
        self._layers = [layer for layer in module.modules() if isinstance(layer, LoraLinear)]
        self._shards, self._comm = shards, comm
        self._record: AdapterRecord | None = None

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within, the policy is its base. Adapters are on again after, also after an error."""
        for layer in self._layers:
            layer.active = False
        try:
            yield
        finally:
            for layer in self._layers:
                layer.active = True

    def record(self, rollout_dtype: torch.dtype) -> AdapterRecord:
        """What the adapters are for; the same on every rank. A collective; the base is hashed once, its tensors dealt out over the ranks."""
        if self._record is None:
            layer = self._layers[0]
            names = [name.removesuffix(".lora_A.weight") for name in self._shards if name.endswith(".lora_A.weight")]
            dtype = torch.bfloat16 if torch.bfloat16 in (rollout_dtype, layer.weight.dtype) else torch.float32
            self._record = AdapterRecord(layer.rank, layer.scaling, names, str(dtype).removeprefix("torch."), self._digests(dtype))
        return self._record

    def _digests(self, dtype: torch.dtype) -> dict[str, str]:
        names = [name for name, parameter in self._shards.items() if not parameter.requires_grad]
        ranks, mine = self._comm.ranks, []
        for i, name in enumerate(names):
            tensor = whole(self._shards[name].detach(), dtype)
            if i % ranks == self._comm.rank:
                mine.append(base_digest(tensor, dtype))
        words = [[int(digest[8 * word : 8 * word + 8], 16) for digest in mine] for word in range(_DIGEST_WORDS)]
        every, _ = self._comm.gather(torch.tensor(words, dtype=torch.float64))
        digests = ["".join(f"{int(word):08x}" for word in column) for column in every.T.tolist()]
        return dict(zip([name for rank in range(ranks) for name in names[rank::ranks]], digests, strict=True))


def write_peft(folder: Path, record: AdapterRecord, tensors: Mapping[str, Tensor], base_path: str) -> None:
    """The adapter as a folder that ``peft`` and vLLM load: ``adapter_config.json`` and ``adapter_model.safetensors``."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_path,
        "r": record.rank,
        "lora_alpha": record.scaling * record.rank,
        "target_modules": record.layers,
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))

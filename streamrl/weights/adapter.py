"""Adapters (LoRA) as tensors: which layers of a model have one, how it is merged into the base below it, and whether that base is the right one.

    W = W_base + scaling · B A        A (rank, in), B (out, rank), scaling = lora_alpha / lora_rank

Who serves an adapter merges it anew from the base for every version, in float32, and casts afterwards: rounding never adds up, and sequences that run go
on under the new version as with whole weights. Guarantees: tensors of the base are compared by hash (``check_base``), so an adapter never serves on
another model than the one it was trained on. Doesn't know engines, files or training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from streamrl.config.lora import ALL_LINEAR, LoraKeys, patterns
from streamrl.errors import ConfigError, WeightMismatch
from streamrl.protocol.weights import AdapterRecord
from streamrl.weights.files import digest
from streamrl.weights.snapshot import raw_bytes


def adapted_layers(model: nn.Module, config: LoraKeys) -> list[str]:
    """Names of the layers that ``config`` gives an adapter, in the model's order; none with ``lora_rank`` 0. ConfigError for a target without a layer."""
    if config.lora_rank == 0:
        return []
    head = getattr(model, "get_output_embeddings", lambda: None)()
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear and module is not head]
    wanted = patterns(config)
    if wanted == (ALL_LINEAR,) and linear:
        return linear
    unmatched = [target for target in wanted if not any(_ends(name, target) for name in linear)]
    if unmatched:
        endings = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear)) or "none"
        raise ConfigError(f"$.model.target_modules: each must name linear layers of the model, got {unmatched[0]!r} without one; it has {endings}")
    return [name for name in linear if any(_ends(name, target) for target in wanted)]


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


def names_of(layer: str) -> tuple[str, str, str]:
    """The base's weight, A and B of a layer."""
    return f"{layer}.weight", f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def adapter_shapes(layers: Iterable[str], base: Mapping[str, tuple[int, ...]], rank: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the adapter tensors of ``layers``, from those of the base."""
    shapes: dict[str, tuple[int, ...]] = {}
    for weight, a, b in map(names_of, layers):
        outputs, inputs = base[weight]
        shapes |= {a: (rank, inputs), b: (outputs, rank)}
    return shapes


def merge(base: Tensor, a: Tensor, b: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """``base + scaling · b a`` on the device of ``a``, in float32, then in ``dtype``."""
    return torch.addmm(base.to(a.device, torch.float32), b.float(), a.float(), alpha=scaling).to(dtype)


def merged(record: AdapterRecord, adapter: Mapping[str, Tensor], base: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The tensors of ``base`` with the adapted ones merged; the others as they come. WeightMismatch at the end if an adapted one did not come."""
    places = {weight: (a, b) for weight, a, b in map(names_of, record.layers)}
    for name, tensor in base:
        place = places.pop(name, None)
        yield name, tensor if place is None else merge(tensor, adapter[place[0]], adapter[place[1]], record.scaling, dtype)
    if places:
        raise WeightMismatch(f"the base must hold every adapted weight, got none for {sorted(places)[:5]}; it is another model than the learner's")


def base_digest(tensor: Tensor, dtype: torch.dtype) -> str:
    """Hash of one tensor of a base in ``dtype``, however exactly it is held here."""
    return digest(raw_bytes(tensor.detach().to(dtype) if tensor.is_floating_point() else tensor))


def check_base(record: AdapterRecord, base: Iterable[tuple[str, Tensor]]) -> None:
    """WeightMismatch unless ``base`` holds every tensor that the adapter was trained on, bit by bit. Further ones (a tied copy) may be there."""
    expected, dtype = dict(record.base), getattr(torch, record.base_dtype)
    for name, tensor in base:
        wanted = expected.pop(name, None)
        if wanted is not None and (got := base_digest(tensor, dtype)) != wanted:
            raise _other_base(f"tensor {name!r} hashes to {got} in {record.base_dtype}, and to {wanted} at the learner")
    if expected:
        raise _other_base(f"no tensor {sorted(expected)[0]!r} ({len(expected)} are missing)")


class KeptBase:
    """The base of an engine that writes merged weights over its own: the adapted ones are copied to the CPU before the first adapter changes them."""

    def __init__(self) -> None:
        self._weights: dict[str, Tensor] = {}
        self._digests: dict[str, str] = {}  # what the base was found to be; hashing it once is enough, for it stays

    def merged(self, record: AdapterRecord, adapter: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The next values of the adapted ``parameters``, in their dtype and on their device, each made when it is asked for: no second model is ever in
        memory. WeightMismatch at once for another base."""
        if record.base != self._digests:
            check_base(record, {**parameters, **self._weights}.items())
            self._digests = record.base
        if not self._weights:
            self._weights = {name: parameters[name].detach().to("cpu", copy=True) for name, _, _ in map(names_of, record.layers)}
        one = parameters[names_of(record.layers[0])[0]]
        return merged(record, {name: tensor.to(one.device) for name, tensor in adapter.items()}, self._weights.items(), one.dtype)


def _other_base(got: str) -> WeightMismatch:
    return WeightMismatch(f"an adapter serves on the base it was trained on, got another: {got}; give learner and engines the same model.path")

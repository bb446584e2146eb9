"""What a model folder says about a model: its eos tokens, and the names and shapes that the learner will publish.

Names come from the model class that the learner trains (built without memory, on the meta device), never from an engine's own layout: an engine that
fuses or renames parameters is checked against the same list as one that doesn't.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from streamrl.config.rollout import ModelConfig
from streamrl.errors import WeightMismatch
from streamrl.protocol.weights import WeightManifest
from streamrl.weights.reader import checked_names

if TYPE_CHECKING:
    import torch


class ModelTensors(msgspec.Struct, frozen=True):
    """``shapes`` of the parameters by name, tied ones once; ``aliases`` maps further names of tied ones to those. ``adapter``: shapes
    of the adapters' tensors; when there are any, they alone are published."""

    shapes: dict[str, tuple[int, ...]]
    aliases: dict[str, str]
    adapter: dict[str, tuple[int, ...]] = {}

    def check(self, manifest: WeightManifest) -> None:
        """WeightMismatch unless the manifest holds exactly the tensors that are published, in their shapes."""
        shapes = self.adapter or self.shapes
        checked_names(shapes, manifest, self.aliases)
        if bool(self.adapter) != (manifest.adapter is not None):
            raise WeightMismatch(f"tensors of an adapter come with a record of its layers and its base, got version {manifest.version} without; publish again")
        for record in manifest.tensors:
            expected = shapes[self.aliases.get(record.name, record.name)]
            if tuple(record.shape) != expected:
                raise WeightMismatch(
                    f"tensor {record.name!r} must have shape {expected}, got {tuple(record.shape)} in version {manifest.version}; "
                    "the learner and the engine must be built from the same model"
                )


def tensors_of(model: torch.nn.Module, config: ModelConfig) -> ModelTensors:
    """Names, shapes, ties and adapters of a model built by transformers."""
    from streamrl.weights.adapter import adapted_layers, adapter_shapes

    shapes: dict[str, tuple[int, ...]] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            aliases[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
            shapes[name] = tuple(parameter.shape)
    return ModelTensors(shapes, aliases, adapter_shapes(adapted_layers(model, config), shapes, config.lora_rank))


def tensors_of_folder(model: ModelConfig) -> ModelTensors:
    """As :func:`tensors_of`, without loading a weight."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
    built.tie_weights()
    return tensors_of(built, model)


def eos_ids(model: ModelConfig) -> frozenset[int]:
    """The tokens that end an answer: those of the generation config, else of the model config."""
    from transformers import AutoConfig, GenerationConfig

    try:
        found = _ids(GenerationConfig.from_pretrained(model.path).eos_token_id)
    except OSError:  # a folder without generation_config.json
        found = frozenset()
    return found or _ids(AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code).eos_token_id)


def _ids(value: int | Iterable[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value]) if isinstance(value, int) else frozenset(value)

"""From a Hugging Face folder to the weights of a sharded model, without a whole model in memory.

``open_policy`` builds the model with parameters that have a shape and no memory; it is altered (adapters, a value head) and sharded as such. ``fill``
then gives every rank memory for its shards and reads those from the safetensors files, cast to the dtype that the model has. Files whose tensors are
not the model's one by one (an older format, experts to be merged, a weight under both its names) go through ``from_pretrained``: then each rank holds the whole
model once, until it is filled. Guarantees: every tensor that the model had when it was opened comes from a file.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from streamrl.config.rollout import ModelConfig
from streamrl.errors import ConfigError
from streamrl.learner.attention import pack
from streamrl.learner.sharding import checkpoint_activations, local

log = logging.getLogger(__name__)


@dataclass
class Pretrained:
    """A model and where its weights are. ``model`` may be altered until it is sharded; parameters added with memory keep their values."""

    model: nn.Module
    sources: dict[str, str] = field(default_factory=dict)  # name in the model -> name of its tensor; tied names have one
    folder: str = ""  # of the safetensors files
    tensors: dict[str, Tensor] | None = None  # instead of files


def open_policy(model: ModelConfig, path: str | None = None, key: str = "model.path") -> Pretrained:
    """The causal language model of ``model``, or that at ``path``, in float32."""
    pretrained = open_model("AutoModelForCausalLM", path or model.path, key, "a causal language model", model.trust_remote_code, attn_implementation="sdpa")
    pack(pretrained.model, model.use_remove_padding)
    if model.enable_gradient_checkpointing:
        checkpoint_activations(pretrained.model)
    return pretrained


def open_model(auto: str, path: str, key: str, kind: str, trust_remote_code: bool, **how: Any) -> Pretrained:
    """A model as the class ``auto`` of transformers builds it, in float32. Dropout is off: a token's old and new log-prob must come from one function."""
    import transformers
    from accelerate import init_empty_weights
    from safetensors import SafetensorError

    how |= {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        if getattr(config, "quantization_config", None):
            raise ValueError("its weights are quantised: no gradient can move them")
        with init_empty_weights(include_buffers=False):
            model = getattr(transformers, auto).from_config(config, **how)
        model.tie_weights()  # a parameter that lost its memory is another one
        folder = _safetensors_folder(path)
        sources = _sources(model, folder) if folder else None
        pretrained = Pretrained(model, sources, folder) if folder and sources else _read_whole(auto, path, how)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"$.{key}: must be a Hugging Face folder or hub id of {kind}, got {path!r} ({error}); correct it") from error
    pretrained.model.eval()
    return pretrained


def _safetensors_folder(path: str) -> str | None:
    """Where the files are on this machine, fetched when ``path`` is a hub id."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    if one := cached_file(path, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False):
        return os.path.dirname(one)
    if index := cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False):
        get_checkpoint_shard_files(path, index)
        return os.path.dirname(index)
    return None


def _sources(model: nn.Module, folder: str) -> dict[str, str] | None:
    """Which tensor of the files is which of the model. None: some tensor is in no file, in several, or in another shape, or transformers would alter it."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    if any(isinstance(step, WeightConverter) for step in get_model_conversion_mapping(model, add_legacy=False)):
        log.info("transformers converts what %s holds: every rank reads the whole model", folder)
        return None
    held = dcp.HuggingFaceStorageReader(folder).read_metadata().state_dict_metadata
    names: dict[int, list[str]] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    sources = {}
    for alike in names.values():
        found = [name for name in alike if name in held]
        if len(found) != 1 or len(held[found[0]].chunks) != 1 or held[found[0]].size != tensors[alike[0]].shape:
            log.info("%s does not hold %s as the model names it: every rank reads the whole model", folder, alike[0])
            return None
        sources |= dict.fromkeys(alike, found[0])
    return sources


def _read_whole(auto: str, path: str, how: dict[str, Any]) -> Pretrained:
    import transformers

    model, info = getattr(transformers, auto).from_pretrained(path, output_loading_info=True, **how)
    if lacking := sorted(info["missing_keys"]):
        raise ValueError(f"its files lack {len(lacking)} tensors, {lacking[:3]}")
    tensors = dict(model.state_dict())
    empty: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            module.register_parameter(name, empty.setdefault(id(parameter), nn.Parameter(parameter.to("meta"), parameter.requires_grad)))
    return Pretrained(model, {name: name for name in tensors}, tensors=tensors)


@torch.no_grad()
def fill(module: nn.Module, pretrained: Pretrained, prefix: str, device: torch.device) -> None:
    """Give the sharded ``module`` memory on ``device`` and its weights. ``prefix``: what it calls the model. A collective."""
    hollow = {name.removeprefix(prefix) for name, parameter in module.named_parameters(remove_duplicate=False) if parameter.is_meta}
    if unknown := sorted(hollow - set(pretrained.sources)):
        raise AssertionError(f"a parameter that is added to an opened model has memory, got none in {unknown[:3]}")
    kept = {name.removeprefix(prefix) for name, _ in module.named_parameters(remove_duplicate=False)} - hollow
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    tensors = {name.removeprefix(prefix): tensor for name, tensor in module.state_dict().items()}
    known = {pretrained.sources[name]: tensor for name, tensor in tensors.items() if name in set(pretrained.sources) - kept}
    if pretrained.tensors is None:
        dcp.load(known, storage_reader=dcp.HuggingFaceStorageReader(pretrained.folder))
    else:
        for name, tensor in known.items():
            _copy_part(tensor, pretrained.tensors[name])
        pretrained.tensors = {}


def _copy_part(tensor: Tensor, value: Tensor) -> None:
    """This rank's part of the whole ``value``."""
    if isinstance(tensor, DTensor):
        value = local(distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None))
    local(tensor).copy_(value)

"""A policy as a Hugging Face folder that transformers, vLLM and others load: made of a checkpoint's shards, by one process, without the learner ranks.

The small files (configuration, tokenizer, chat template) are those of the model the run began with, byte by byte; weights are named and cut as
``save_pretrained`` does it. Adapters are merged into their base, in float32, and rounded once. Guarantees: every tensor of the model is there, in ``dtype``;
only tensors are written, and code only for a model that needs its own. Doesn't know critics.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor, nn

from streamrl.config.rollout import ModelConfig
from streamrl.errors import CheckpointError, StreamrlError
from streamrl.protocol.weights import AdapterRecord
from streamrl.weights.adapter import check_base, merged

log = logging.getLogger(__name__)

FOLDER = "huggingface"  # in a checkpoint's folder of the policy
ADAPTER = "adapter.json"
_PLAIN = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "additional_chat_templates/*.jinja")
_OF_MODEL = ("config.json", "generation_config.json")
_PREFIX = "model."  # of weights among a checkpoint's tensors
_FILE_SIZE = "5GB"


def plain_files(model: ModelConfig) -> dict[str, bytes]:
    """What belongs to the model beside its weights, by path in its folder. Read from the folder or from the hub's cache; nothing is downloaded."""
    files: dict[str, bytes] = {}
    if (folder := _folder(model.tokenizer_path or model.path)) is not None:
        found = [path for pattern in _PLAIN for path in folder.glob(pattern) if not path.name.endswith(".index.json")]
        files = {str(path.relative_to(folder)): path.read_bytes() for path in found if path.name not in _OF_MODEL}
    if (folder := _folder(model.path)) is not None:
        code = [path.name for path in folder.glob("*.py")] if model.trust_remote_code else []
        files |= {name: (folder / name).read_bytes() for name in (*_OF_MODEL, *code) if (folder / name).is_file()}
    if "config.json" not in files:
        log.warning("the small files of %s are not on this machine; checkpoints will lack them", model.path)
    return files


def _folder(path: str) -> Path | None:
    from transformers.utils.hub import cached_file

    if Path(path).is_dir():
        return Path(path)
    found = cached_file(path, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False)
    return None if found is None else Path(found).parent


def write_files(target: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def write_model(target: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype, *, trust_remote_code: bool = False) -> None:
    """Add the weights to a folder with the small files in it. CheckpointError when they are not exactly the model's."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    config = AutoConfig.from_pretrained(target, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    model.tie_weights()
    _check_names(model, tensors, target)
    settings = target / "generation_config.json"
    as_it_was = settings.read_bytes() if settings.is_file() else None
    transformers_logging.disable_progress_bar()
    model.save_pretrained(target, state_dict=dict(tensors), max_shard_size=_FILE_SIZE)
    if as_it_was is not None:  # what it wrote is derived from the configuration
        settings.write_bytes(as_it_was)


def _check_names(model: nn.Module, tensors: Mapping[str, Tensor], target: Path) -> None:
    alike: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        alike.setdefault(id(tensor), []).append(name)
    missing = [names[0] for names in alike.values() if not set(names) & set(tensors)]
    unknown = set(tensors) - {name for names in alike.values() for name in names}
    if missing or unknown:
        raise CheckpointError(
            f"an exported model has exactly the tensors that {target / 'config.json'} says, got {len(missing)} missing {missing[:3]} and {len(unknown)} "
            f"unknown {sorted(unknown)[:3]}; export with the transformers version of the run"
        )


def small_files(folder: Path) -> dict[str, bytes]:
    """What a checkpoint keeps of them."""
    paths = [path for path in folder.rglob("*") if path.is_file() and ".safetensors" not in path.name]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def saved_policy(source: Path, dtype: torch.dtype, model: ModelConfig) -> dict[str, Tensor]:
    """The whole policy of a checkpoint's folder ``actor``, cast, adapters merged into the base at ``model.path``."""
    if not (source / ADAPTER).is_file():
        return _saved_tensors(source, dtype)
    return merged_policy(adapter_record(source), saved_adapter(source), dtype, model)


def adapter_record(source: Path) -> AdapterRecord:
    """CheckpointError for a checkpoint of whole weights."""
    try:
        return msgspec.json.decode((source / ADAPTER).read_bytes(), type=AdapterRecord)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"a checkpoint of adapters holds {ADAPTER}, got {error} in {source}; it was saved with model.lora_rank=0") from error


def saved_adapter(source: Path) -> dict[str, Tensor]:
    """The adapter's own tensors, in float32."""
    return _saved_tensors(source, torch.float32)


def merged_policy(record: AdapterRecord, adapter: Mapping[str, Tensor], dtype: torch.dtype, model: ModelConfig) -> dict[str, Tensor]:
    """Adapter tensors merged into the base at ``model.path``, which must be the one they were trained on."""
    from transformers import AutoModelForCausalLM

    try:
        base = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32, trust_remote_code=model.trust_remote_code)
        check_base(record, base.named_parameters())
        whole = ((name, tensor.detach()) for name, tensor in base.state_dict().items())
        return {name: _cast(tensor, dtype) for name, tensor in merged(record, adapter, whole, dtype)}
    except (OSError, StreamrlError) as error:
        raise CheckpointError(f"adapters are merged into the model they were trained on, got {model.path!r} ({error}); name it with model.path=...") from error


def _saved_tensors(source: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Put together from the shards of all ranks, each cast as it is read."""
    held: Any = dcp.HuggingFaceStorageReader(str(source)).read_metadata()
    saved = {name: entry for name, entry in held.state_dict_metadata.items() if name.startswith(_PREFIX)}
    if not saved:
        raise CheckpointError(f"a checkpoint holds the policy's weights, got none in {source}; name a folder global_step_N")
    tensors = {
        name: torch.empty(entry.size, dtype=dtype if entry.properties.dtype.is_floating_point else entry.properties.dtype) for name, entry in saved.items()
    }
    pieces: dict[str, list[tuple[str, list[int]]]] = {}
    for index, place in held.storage_data.items():
        if index.fqn in tensors:
            pieces.setdefault(place.relative_path, []).append((index.fqn, list(index.offset)))
    for path, parts in pieces.items():
        with safe_open(path, framework="pt") as file:
            for name, offsets in parts:
                part = file.get_tensor(name)
                tensors[name][tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))] = part
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor

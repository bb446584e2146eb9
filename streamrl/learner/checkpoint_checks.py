"""Whether a checkpoint is one that this learner can go on from: told before anything of it is loaded. The driver asks too, so nothing here imports torch."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from streamrl.errors import CheckpointError
from streamrl.protocol.weights import AdapterRecord

if TYPE_CHECKING:
    import torch.distributed.checkpoint as dcp
    from torch import Tensor

log = logging.getLogger(__name__)

PROGRESS = "learner.json"


def read_progress(folder: Path) -> dict[str, Any]:
    try:
        saved = msgspec.json.decode((folder / PROGRESS).read_bytes(), type=dict[str, Any])
        if not {"contents", "models"} <= set(saved):
            raise ValueError(f"only {sorted(saved)}")
        return saved
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"a checkpoint holds {PROGRESS}, got {error!r} in {folder}; resume from another one") from error


def check_contents(saved: dict[str, Any], wanted: tuple[str, ...], models: Collection[str], folder: Path) -> None:
    if lacking := sorted(set(models) - set(saved["models"])):
        raise CheckpointError(
            f"a run goes on from a checkpoint that has all its models, got one without {', '.join(lacking)} in {folder}; "
            "resume with the algorithm it was saved by, or start anew with model.path set to its exported policy"
        )
    if idle := sorted(set(saved["models"]) - set(models)):
        log.warning("%s holds a %s, which this run does not have; it is left out", folder, ", ".join(idle))
    if lacking := [name for name in wanted if name not in saved["contents"]]:
        raise CheckpointError(
            f"actor.checkpoint.load_contents names what a checkpoint holds, got {', '.join(lacking)}, which is not in {folder}: that has "
            f"{', '.join(saved['contents'])}; name those alone"
        )


def check_layout(tensors: Mapping[str, Tensor], reader: dcp.HuggingFaceStorageReader, source: Path) -> None:
    saved: dict[str, Any] = reader.read_metadata().state_dict_metadata if source.is_dir() else {}
    missing = sorted(set(tensors) - set(saved))
    wrong = sorted(name for name in set(tensors) & set(saved) if tuple(saved[name].size) != tuple(tensors[name].shape))
    if missing or wrong:
        raise CheckpointError(
            f"a checkpoint holds every tensor of the model in its shape, got {len(missing)} missing {missing[:3]} and {len(wrong)} of another shape "
            f"{wrong[:3]} in {source}; resume with the model it was saved from"
        )


def check_adapter(source: Path, ours: AdapterRecord) -> None:
    from streamrl.learner.huggingface import adapter_record

    saved = adapter_record(source)
    if (saved.rank, saved.scaling, saved.layers) != (ours.rank, ours.scaling, ours.layers):
        raise CheckpointError(
            f"adapters go on as they were saved, got rank {ours.rank}, scaling {ours.scaling:g} and {len(ours.layers)} layers for a checkpoint of rank "
            f"{saved.rank}, scaling {saved.scaling:g} and {len(saved.layers)} in {source}; resume with the configuration it was saved by"
        )
    if ours.base_dtype == saved.base_dtype and (other := [name for name in ours.base if saved.base.get(name) != ours.base[name]]):
        raise CheckpointError(
            f"adapters go on over the model they were trained on, got another {other[0]!r} ({len(other)} tensors differ) for {source}; "
            "set model.path to the model it was saved from"
        )

"""Writes one policy version as raw tensors in one file, and the manifest that names, places and hashes each of them.

Guarantees: the file appears under its name only when it is complete; every float tensor is stored, and hashed, in the dtype the engines run in;
a tensor that shares its memory with an earlier one (tied embeddings) is stored once, under the first name; weights with NaN or Inf never leave.
Doesn't know who reads it, and gathers nothing: shards must be whole tensors by the time they arrive here.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import torch

from streamrl.errors import RunFailed
from streamrl.protocol.weights import AdapterRecord, Probe, TensorRecord, WeightManifest
from streamrl.weights.files import digest, snapshot_path

_ALIGN = 64  # a mapped tensor starts on a cache line, and on a multiple of every dtype's size


def write_snapshot(
    version: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    folder: Path,
    *,
    dtype: torch.dtype | None,
    probe: Probe | None = None,
    adapter: AdapterRecord | None = None,
) -> WeightManifest:
    """Write ``tensors`` as ``version`` under ``folder``. ``dtype`` None keeps each tensor's own; integer tensors always keep theirs.

    RunFailed names the first tensor that is not finite, or the folder that is full; nothing is left behind then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = snapshot_path(folder, version)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            records = _write_tensors(file, tensors, dtype, version)
        os.replace(aside, path)
    except OSError as error:
        raise RunFailed(
            f"version {version} of the weights is written to {folder}, got {error.strerror or error}; free space there, or go on with another dataplane.shm_dir"
        ) from error
    finally:
        aside.unlink(missing_ok=True)
    return WeightManifest(version, str(path), records, sum(record.nbytes for record in records), probe, adapter)


def _write_tensors(file: BinaryIO, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None, version: int) -> list[TensorRecord]:
    records: list[TensorRecord] = []
    seen: dict[tuple, weakref.ref[torch.Tensor]] = {}
    for name, tensor in tensors:
        place = _place(tensor)
        earlier = seen.get(place)
        # Memory that has been given back may be reused by another tensor: only a tensor that is still alive is a tie.
        if earlier is not None and earlier() is not None:
            continue
        seen[place] = weakref.ref(tensor)
        records.append(_write_one(file, name, tensor, dtype, version))
    return records


def _place(tensor: torch.Tensor) -> tuple:
    return (str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tensor.stride()) if tensor.numel() else (id(tensor),)


def _write_one(file: BinaryIO, name: str, tensor: torch.Tensor, dtype: torch.dtype | None, version: int) -> TensorRecord:
    stored = tensor.detach()
    if dtype is not None and stored.is_floating_point():
        stored = stored.to(dtype)
    if stored.is_floating_point() and not bool(torch.isfinite(stored).all()):
        raise RunFailed(
            f"weights must be finite to be published, got NaN or Inf in {name!r} of version {version}; the last update diverged: "
            "resume from the checkpoint before it with a lower actor.optim.lr"
        )
    data = raw_bytes(stored)
    file.write(b"\0" * (-file.tell() % _ALIGN))
    record = TensorRecord(name, str(stored.dtype).removeprefix("torch."), tuple(stored.shape), file.tell(), len(data), digest(data))
    file.write(data)
    return record


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in row-major order."""
    return memoryview(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)

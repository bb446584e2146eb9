"""Reads a snapshot back, and says which tensor is not what the manifest promised.

Guarantees: with ``verify`` no tensor is handed out whose bytes hash to something else; names are compared as sets, so a tensor can neither be
skipped nor added in silence. Doesn't know what a model does with the tensors; torch is imported only when tensors are asked for.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from streamrl.errors import WeightMismatch
from streamrl.protocol.weights import TensorRecord, WeightManifest
from streamrl.weights.files import digest

if TYPE_CHECKING:
    import torch


def read_tensors(manifest: WeightManifest, verify: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) in file order. The tensors are private views of the mapped file: they cost no memory until read, and stay valid after the
    file is deleted. WeightMismatch names the first tensor that differs."""
    import torch

    mapped = _map(manifest)
    view = memoryview(mapped)
    for record in manifest.tensors:
        if verify:
            _check(record, view, manifest)
        dtype = getattr(torch, record.dtype)
        if record.nbytes:
            flat = torch.frombuffer(mapped, dtype=dtype, count=record.nbytes // dtype.itemsize, offset=record.offset)
        else:
            flat = torch.empty(0, dtype=dtype)
        yield record.name, flat.reshape(record.shape)


def verify(manifest: WeightManifest) -> None:
    """Hash every tensor of the file without building one. WeightMismatch names the first that differs."""
    view = memoryview(_map(manifest))
    for record in manifest.tensors:
        _check(record, view, manifest)


def checked_names(loaded: Iterable[str], manifest: WeightManifest, aliases: Mapping[str, str] | None = None) -> None:
    """WeightMismatch unless the tensors an engine holds (``loaded``) are exactly those of the manifest.

    ``aliases`` maps other names of a tied tensor to the name in ``loaded``. An alias in the manifest stands for that tensor.
    """
    own = set(loaded)
    got = {(aliases or {}).get(record.name, record.name) for record in manifest.tensors}
    missing, unexpected = sorted(own - got), sorted(got - own)
    if missing or unexpected:
        raise WeightMismatch(
            f"a snapshot must hold exactly the engine's {len(own)} tensors, got version {manifest.version} with "
            f"missing: {_some(missing)}; unexpected: {_some(unexpected)}; the learner and the engine must be built from the same model"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "none"


def _map(manifest: WeightManifest) -> mmap.mmap:
    try:
        with open(manifest.path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise WeightMismatch(f"a snapshot file must hold {manifest.total_bytes} bytes, got an empty file at {manifest.path}; publish again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError as error:
        raise WeightMismatch(f"the file of version {manifest.version} must exist, got none at {manifest.path}; it was retired or is on another node") from error


def _check(record: TensorRecord, view: memoryview, manifest: WeightManifest) -> None:
    data = view[record.offset : record.offset + record.nbytes]
    got = digest(data) if len(data) == record.nbytes else f"only {len(data)} of {record.nbytes} bytes"
    if got != record.hash:
        raise WeightMismatch(
            f"tensor {record.name!r} of version {manifest.version} must hash to {record.hash}, got {got}; the file {manifest.path} is damaged: publish again"
        )

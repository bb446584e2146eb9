"""Snapshots of another node, copied into this one's memory: once per version, in frames, checked against the manifest before anyone is told.

Guarantees: a file appears under its name only when every tensor hashes to what the manifest says; at most ``retire.KEPT_VERSIONS`` stay. Doesn't know
how bytes travel: a source fetches them. Needs no torch.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from streamrl.protocol.weights import WeightManifest
from streamrl.weights import reader
from streamrl.weights.files import snapshot_path
from streamrl.weights.retire import retire_snapshots

FRAME_BYTES = 16 << 20  # of one fetch
FRAMES_ON_THE_WAY = 4  # so that the wire does not idle between two of them


class SnapshotSource(Protocol):
    """Where the file of a version is."""

    async def fetch(self, version: int, offset: int, num_bytes: int) -> bytes | memoryview:
        """Bytes of the file. WeightMismatch when it was retired."""
        ...


class SnapshotCopies:
    """The copies below ``folder``, which is this object's alone."""

    def __init__(self, folder: Path, source: SnapshotSource, frame_bytes: int = FRAME_BYTES) -> None:
        self._folder = folder
        self._source = source
        self._frame_bytes = frame_bytes
        self._held: dict[int, WeightManifest] = {}
        self._one_at_a_time = asyncio.Lock()

    async def copy(self, manifest: WeightManifest) -> WeightManifest:
        """The manifest of this node's copy. WeightMismatch names the tensor that arrived as something else."""
        async with self._one_at_a_time:
            held = self._held.get(manifest.version)
            if held is None or msgspec.structs.replace(held, path=manifest.path) != manifest:
                held = self._held[manifest.version] = await self._fetch(manifest)
                for path in await asyncio.to_thread(retire_snapshots, self._folder):
                    self._held = {version: known for version, known in self._held.items() if known.path != str(path)}
            return held

    async def _fetch(self, manifest: WeightManifest) -> WeightManifest:
        path = snapshot_path(self._folder, manifest.version)
        aside = msgspec.structs.replace(manifest, path=str(path.with_name(f".{path.name}.tmp")))
        try:
            with open(os.open(aside.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                await self._fill(file, manifest)
            await asyncio.to_thread(reader.verify, aside)
            os.replace(aside.path, path)
        finally:
            Path(aside.path).unlink(missing_ok=True)
        return msgspec.structs.replace(manifest, path=str(path))

    async def _fill(self, file: BinaryIO, manifest: WeightManifest) -> None:
        size = max((record.offset + record.nbytes for record in manifest.tensors), default=0)
        room = asyncio.Semaphore(FRAMES_ON_THE_WAY)

        async def frame(offset: int) -> None:
            async with room:
                data = await self._source.fetch(manifest.version, offset, min(self._frame_bytes, size - offset))
                await asyncio.to_thread(os.pwrite, file.fileno(), data, offset)

        try:
            async with asyncio.TaskGroup() as frames:
                for offset in range(0, size, self._frame_bytes):
                    frames.create_task(frame(offset))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

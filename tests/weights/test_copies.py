"""A snapshot on its way to another node: one copy a version, whole and checked, or none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from streamrl.errors import WeightMismatch
from streamrl.weights.copies import SnapshotCopies
from streamrl.weights.files import snapshot_path
from streamrl.weights.reader import read_tensors
from streamrl.weights.snapshot import write_snapshot


class Files:
    """The learner's node: files in a folder. ``damage`` flips a bit of what is sent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fetched: list[tuple[int, int, int]] = []
        self.damage = False

    async def fetch(self, version: int, offset: int, num_bytes: int) -> bytes:
        self.fetched.append((version, offset, num_bytes))
        data = bytearray(snapshot_path(self.folder, version).read_bytes()[offset : offset + num_bytes])
        data[0] ^= self.damage
        return bytes(data)


def version(number: int, folder: Path):
    tensors = [("a", torch.full((5, 7), float(number))), ("b", torch.arange(3)), ("none", torch.empty(0))]
    return write_snapshot(number, tensors, folder, dtype=None)


def two_nodes(tmp_path: Path) -> tuple[Files, SnapshotCopies, Path]:
    near = tmp_path / "near"
    near.mkdir()
    files = Files(tmp_path / "far")
    return files, SnapshotCopies(near, files, frame_bytes=50), near


def test_a_version_is_fetched_once_in_frames_and_reads_as_it_was_written(tmp_path):
    files, copies, near = two_nodes(tmp_path)
    manifest = version(1, files.folder)

    async def main():
        return await asyncio.gather(*(copies.copy(manifest) for _ in range(3)))

    copied = asyncio.run(main())
    assert {item.path for item in copied} == {str(snapshot_path(near, 1))}
    assert len(files.fetched) == len(set(files.fetched)) > 2 and max(size for _, _, size in files.fetched) == 50
    assert {name: tensor.tolist() for name, tensor in read_tensors(copied[0])} == {name: tensor.tolist() for name, tensor in read_tensors(manifest)}


def test_older_copies_go_and_are_fetched_again_when_they_are_asked_for(tmp_path):
    files, copies, near = two_nodes(tmp_path)
    manifests = [version(number, files.folder) for number in (1, 2, 3)]

    async def main():
        for manifest in manifests:
            await copies.copy(manifest)
        assert sorted(path.name for path in near.iterdir()) == ["v000002.weights", "v000003.weights"]
        before = len(files.fetched)
        await copies.copy(manifests[1])
        assert len(files.fetched) == before

    asyncio.run(main())


def test_bytes_that_do_not_match_the_manifest_leave_no_copy(tmp_path):
    files, copies, near = two_nodes(tmp_path)
    manifest = version(1, files.folder)
    files.damage = True
    with pytest.raises(WeightMismatch, match="'a'"):
        asyncio.run(copies.copy(manifest))
    assert list(near.iterdir()) == []
    files.damage = False
    assert asyncio.run(copies.copy(manifest)).version == 1


def test_a_version_written_anew_under_its_number_is_fetched_anew(tmp_path):
    files, copies, _ = two_nodes(tmp_path)

    async def main():
        await copies.copy(version(1, files.folder))
        other = write_snapshot(1, [("a", torch.zeros(2))], files.folder, dtype=None)
        return await copies.copy(other)

    assert [record.name for record in asyncio.run(main()).tensors] == ["a"]

"""Writing and reading one version."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import RunFailed, WeightMismatch
from streamrl.protocol.weights import Probe, WeightManifest
from streamrl.weights.files import digest, snapshot_path, version_of
from streamrl.weights.reader import checked_names, read_tensors, verify
from streamrl.weights.retire import retire_snapshots
from streamrl.weights.snapshot import write_snapshot
from tests.full_disk import file_limit


def _weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"embed": torch.randn(7, 4), "norm": torch.ones(4), "scale": torch.tensor(0.5), "steps": torch.arange(3), "none": torch.empty(0, 4)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
def test_tensors_come_back_in_the_rollout_dtype_bit_for_bit(tmp_path: Path, dtype: torch.dtype | None) -> None:
    weights = _weights()
    manifest = write_snapshot(3, weights.items(), tmp_path, dtype=dtype)
    read = dict(read_tensors(manifest))
    assert list(read) == list(weights)
    for name, tensor in weights.items():
        expected = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        assert read[name].dtype == expected.dtype
        assert torch.equal(read[name], expected)


@given(shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=6), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=25, deadline=None)
def test_any_shapes_round_trip(tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], dtype: torch.dtype) -> None:
    weights = {f"t{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    if not any(tensor.numel() for tensor in weights.values()):
        return
    manifest = write_snapshot(1, weights.items(), tmp_path_factory.mktemp("w"), dtype=dtype)
    assert {n: t.tolist() for n, t in read_tensors(manifest)} == {n: t.to(dtype).tolist() for n, t in weights.items()}


def test_a_manifest_describes_the_file_and_survives_the_wire(tmp_path: Path) -> None:
    probe = Probe([1, 2], [-0.5], 0.1)
    manifest = write_snapshot(12, _weights().items(), tmp_path, dtype=torch.bfloat16, probe=probe)
    path = Path(manifest.path)
    assert path.name == "v000012.weights" and manifest.version == 12 and manifest.probe == probe
    assert manifest.total_bytes == sum(record.nbytes for record in manifest.tensors) == (28 + 4 + 1) * 2 + 3 * 8
    content = path.read_bytes()
    assert all(record.hash == digest(content[record.offset : record.offset + record.nbytes]) for record in manifest.tensors)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=WeightManifest) == manifest


def test_a_full_disk_is_named_with_its_folder_and_key_and_leaves_nothing(tmp_path: Path) -> None:
    with file_limit(40), pytest.raises(RunFailed, match=rf"version 3 .* {tmp_path}.* File too large.*dataplane.shm_dir"):
        write_snapshot(3, _weights().items(), tmp_path, dtype=None)
    assert list(tmp_path.iterdir()) == []


def test_only_the_owner_may_read_the_file_and_nothing_is_left_aside(tmp_path: Path) -> None:
    manifest = write_snapshot(1, _weights().items(), tmp_path, dtype=None)
    assert stat.S_IMODE(Path(manifest.path).stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["v000001.weights"]


def test_tied_tensors_are_written_once_under_the_first_name(tmp_path: Path) -> None:
    shared = torch.nn.Parameter(torch.randn(5, 3))
    manifest = write_snapshot(1, [("embed", shared), ("head", shared), ("alone", torch.randn(5, 3))], tmp_path, dtype=torch.bfloat16)
    assert [record.name for record in manifest.tensors] == ["embed", "alone"]


def test_tensors_gathered_one_by_one_into_the_same_memory_are_not_tied(tmp_path: Path) -> None:
    manifest = write_snapshot(1, ((f"t{i}", torch.full((64, 64), float(i))) for i in range(8)), tmp_path, dtype=torch.float32)
    assert [float(tensor[0, 0]) for _, tensor in read_tensors(manifest)] == [float(i) for i in range(8)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_never_leave(tmp_path: Path, bad: float) -> None:
    weights = _weights()
    weights["norm"][2] = bad
    with pytest.raises(RunFailed, match=r"'norm' of version 4"):
        write_snapshot(4, weights.items(), tmp_path, dtype=torch.bfloat16)
    assert list(tmp_path.iterdir()) == []


def _flip(manifest: WeightManifest, name: str) -> None:
    record = next(record for record in manifest.tensors if record.name == name)
    with open(manifest.path, "r+b") as file:
        file.seek(record.offset)
        byte = file.read(1)
        file.seek(record.offset)
        file.write(bytes([byte[0] ^ 1]))


def test_one_flipped_bit_is_found_and_the_tensor_named(tmp_path: Path) -> None:
    manifest = write_snapshot(2, _weights().items(), tmp_path, dtype=torch.float32)
    _flip(manifest, "norm")
    with pytest.raises(WeightMismatch, match="'norm' of version 2"):
        list(read_tensors(manifest))
    with pytest.raises(WeightMismatch, match="'norm' of version 2"):
        verify(manifest)


def test_a_truncated_empty_or_missing_file_is_a_mismatch(tmp_path: Path) -> None:
    manifest = write_snapshot(2, _weights().items(), tmp_path, dtype=torch.float32)
    path = Path(manifest.path)
    steps = next(record for record in manifest.tensors if record.name == "steps")
    path.write_bytes(path.read_bytes()[: steps.offset + 10])
    with pytest.raises(WeightMismatch, match="steps"):
        verify(manifest)
    path.write_bytes(b"")
    with pytest.raises(WeightMismatch, match="empty file"):
        verify(manifest)
    path.unlink()
    with pytest.raises(WeightMismatch, match="got none at"):
        verify(manifest)


def test_a_reader_keeps_its_tensors_after_the_file_is_retired(tmp_path: Path) -> None:
    weights = {"w": torch.randn(300, 10)}
    manifest = write_snapshot(1, weights.items(), tmp_path, dtype=torch.float32)
    read = dict(read_tensors(manifest))
    Path(manifest.path).unlink()
    assert torch.equal(read["w"], weights["w"])


def test_names_must_match_as_sets(tmp_path: Path) -> None:
    manifest = write_snapshot(1, [(f"a.{i}", torch.ones(1)) for i in range(10)], tmp_path, dtype=None)
    checked_names([f"a.{i}" for i in range(10)], manifest)
    checked_names(["b", *(f"a.{i}" for i in range(1, 10))], manifest, {"a.0": "b"})
    with pytest.raises(WeightMismatch, match=r"missing: b\.1, b\.2.*and 4 more; unexpected: a\.1, "):
        checked_names(["a.0", *(f"b.{i}" for i in range(1, 10))], manifest)


def test_the_two_newest_versions_stay(tmp_path: Path) -> None:
    for version in (1, 2, 3, 10):
        write_snapshot(version, [("w", torch.ones(1))], tmp_path, dtype=None)
    (tmp_path / "notes.txt").write_text("kept")
    assert [version_of(path) for path in retire_snapshots(tmp_path)] == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "v000003.weights", "v000010.weights"]
    assert snapshot_path(tmp_path, 1234567).name == "v1234567.weights"
    assert version_of(snapshot_path(tmp_path, 1234567)) == 1234567

"""Checkpoint folders: written aside, complete by one rename, checked before use, pruned to a number. Knows nothing of their content.

    root/.writing_global_step_20/     under way; a crash leaves it, the next ``begin`` clears it
    root/global_step_10/              complete: manifest.json lists size and checksum of every file and is written last
    root/latest_checkpointed_iteration.txt    the newest step, for people and scripts; ``latest`` does not trust it

A crash at any point leaves the older complete folders usable. Imports no torch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from pathlib import Path

import msgspec

from streamrl.errors import CheckpointError

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
POINTER = "latest_checkpointed_iteration.txt"
_NAME = re.compile(r"global_step_(0|[1-9][0-9]*)")
_ASIDE = ".writing_"
_OLD = ".replaced_"
_BLOCK_BYTES = 1 << 20


def begin(root: Path, step: int) -> Path:
    """An empty folder to write into; leftovers of crashed writers are removed."""
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    for leftover in [*root.glob(f"{_ASIDE}*"), *root.glob(f"{_OLD}*")]:
        log.warning("removing the unfinished checkpoint %s", leftover)
        shutil.rmtree(leftover)
    aside = root / f"{_ASIDE}global_step_{step}"
    aside.mkdir()
    return aside


def finish(aside: Path, *, max_to_keep: int) -> Path:
    """Make the folder complete and the newest; only then remove those beyond ``max_to_keep``."""
    aside = Path(aside)
    root, target = aside.parent, aside.parent / aside.name.removeprefix(_ASIDE)
    _write_manifest(aside)
    if target.exists():  # the same step again, after a resume: never a moment without a complete folder of another step or this one
        old = root / f"{_OLD}{target.name}"
        target.rename(old)
        aside.rename(target)
        shutil.rmtree(old)
    else:
        aside.rename(target)
    _sync(root)
    _write_pointer(root, step_of(target))
    _prune(root, max_to_keep)
    return target


def latest(root: Path) -> Path | None:
    """The newest complete folder; damaged ones are skipped with a warning each. None when there is nothing usable."""
    for folder in sorted(_complete_names(Path(root)), key=step_of, reverse=True):
        try:
            check(folder)
            return folder
        except CheckpointError as error:
            log.warning("NOT resuming from %s, looking for an older one: %s", folder, error)
    return None


class Entry(msgspec.Struct, frozen=True):
    """One file as it was written."""

    bytes: int
    blake2b: str


class Manifest(msgspec.Struct, frozen=True):
    """The completeness mark of a checkpoint; ``files`` by path below the folder."""

    files: dict[str, Entry]


def check(folder: Path) -> None:
    """CheckpointError unless every file is there with its size and checksum."""
    folder = Path(folder)
    if not _NAME.fullmatch(folder.name) or not folder.is_dir():
        raise CheckpointError(f"a checkpoint is a folder named global_step_N, got {folder}; give one of those")
    try:
        files = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest).files
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"a complete checkpoint has a readable {MANIFEST}, got {error!r} in {folder}; resume from another one") from error
    if not files:
        raise CheckpointError(f"a complete checkpoint lists its files in {MANIFEST}, got none in {folder}; resume from another one")
    for name, entry in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry.bytes or _checksum(path) != entry.blake2b:
            raise CheckpointError(f"every file of a checkpoint is as it was written, got a missing or changed {name} in {folder}; resume from another one")


def step_of(folder: Path) -> int:
    """The N of global_step_N."""
    match = _NAME.fullmatch(Path(folder).name)
    if match is None:
        raise CheckpointError(f"a checkpoint is a folder named global_step_N, got {folder}; give one of those")
    return int(match.group(1))


def _complete_names(root: Path) -> list[Path]:
    return [folder for folder in root.glob("global_step_*") if _NAME.fullmatch(folder.name)] if root.is_dir() else []


def _write_manifest(folder: Path) -> None:
    """The completeness mark: after all data is on disk, itself last."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        _sync(path)
    entries = {str(path.relative_to(folder)): Entry(path.stat().st_size, _checksum(path)) for path in files}
    _write_aside(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(Manifest(entries)), indent=1).decode())
    for directory in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        _sync(directory)


def _write_pointer(root: Path, step: int) -> None:
    _write_aside(root / POINTER, f"{step}\n")
    _sync(root)


def _prune(root: Path, max_to_keep: int) -> None:
    """Oldest first; the newest ``max_to_keep`` (at least one) stay."""
    folders = sorted(_complete_names(root), key=step_of)
    for folder in folders[: max(0, len(folders) - max(1, max_to_keep))]:
        doomed = root / f"{_OLD}{folder.name}"
        folder.rename(doomed)  # half-removed folders must not look complete
        shutil.rmtree(doomed)


def _write_aside(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(text)
    _sync(aside)
    aside.replace(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checksum(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()

"""Checkpoint folders: written aside, complete by one rename, checked before use, pruned to a number. Knows nothing of their content.

    root/.writing_global_step_20/     under way; a crash leaves it, the next ``begin`` clears it
    root/.replaced_global_step_10/    an older folder of the same step, for the moment in which the newer one takes its name
    root/.removing_global_step_5/     pruned
    root/global_step_10/              complete: manifest.json lists size and checksum of every file and is written last
    root/latest_checkpointed_iteration.txt    the newest step, for people and scripts; ``latest`` does not trust it

A crash at any point, and a disk that is full, leave the older complete folders usable. One process writes at a time; any may read. Imports no torch.
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
_DOOMED = ".removing_"
_BLOCK_BYTES = 1 << 20
_RESERVE_BYTES = 64 << 20  # left to the run's journals and logs, which usually lie on the same disk


def begin(root: Path, step: int) -> Path:
    """An empty folder to write into; leftovers of crashed writers are removed."""
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(root)
    aside = root / f"{_ASIDE}global_step_{step}"
    aside.mkdir()
    return aside


def finish(aside: Path, *, max_to_keep: int) -> Path:
    """Make the folder complete and the newest; only then remove those beyond ``max_to_keep``."""
    aside = Path(aside)
    root, target = aside.parent, aside.parent / aside.name.removeprefix(_ASIDE)
    _write_manifest(aside)
    old = root / f"{_OLD}{target.name}"
    if target.exists():  # the same step again, after a resume
        target.rename(old)  # from here to the next line ``latest`` takes it under this name
    aside.rename(target)
    _sync(root)
    try:
        shutil.rmtree(old, ignore_errors=True)
        _write_pointer(root, step_of(target))
        _prune(root, max_to_keep, target)
    except OSError as error:
        log.warning("%s is complete, but what should follow it failed: %s", target, error)
    return target


def check_room(aside: Path, needed_bytes: int) -> None:
    """CheckpointError when the disk has no room for as much, before anything is written."""
    free_bytes = shutil.disk_usage(aside).free
    if free_bytes < needed_bytes + _RESERVE_BYTES:
        raise CheckpointError(
            f"a checkpoint must fit, got {needed_bytes} bytes needed, {_RESERVE_BYTES} to be left over and {free_bytes} free in {aside.parent}; make room "
            "there: one more folder than trainer.max_ckpt_to_keep is on disk while it is written"
        )


def abandon(aside: Path) -> None:
    """Remove what could not be finished, so that it takes no room."""
    shutil.rmtree(aside, ignore_errors=True)


def latest(root: Path) -> Path | None:
    """The newest complete folder; damaged ones are skipped with a warning each. None when there is nothing usable. Changes nothing."""
    for folder in sorted(_candidates(Path(root)), key=step_of, reverse=True):
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
    if not _NAME.fullmatch(folder.name.removeprefix(_OLD)) or not folder.is_dir():
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
    match = _NAME.fullmatch(Path(folder).name.removeprefix(_OLD))
    if match is None:
        raise CheckpointError(f"a checkpoint is a folder named global_step_N, got {folder}; give one of those")
    return int(match.group(1))


def _named(root: Path) -> list[Path]:
    return [folder for folder in root.glob("global_step_*") if _NAME.fullmatch(folder.name)] if root.is_dir() else []


def _orphans(root: Path) -> list[Path]:
    """Folders whose successor never came to have their name: its writer was killed between two renames."""
    return [old for old in root.glob(f"{_OLD}global_step_*") if not (root / old.name.removeprefix(_OLD)).exists()]


def _candidates(root: Path) -> list[Path]:
    return [*_named(root), *_orphans(root)] if root.is_dir() else []


def _clear_leftovers(root: Path) -> None:
    for orphan in _orphans(root):
        orphan.rename(root / orphan.name.removeprefix(_OLD))
    for leftover in [*root.glob(f"{_ASIDE}*"), *root.glob(f"{_OLD}*"), *root.glob(f"{_DOOMED}*")]:
        log.warning("removing the leftover %s of an interrupted checkpoint", leftover)
        shutil.rmtree(leftover)


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


def _prune(root: Path, max_to_keep: int, newest: Path) -> None:
    """Oldest first. ``newest`` stays whatever its number: others may be damaged."""
    others = sorted((folder for folder in _named(root) if folder != newest), key=step_of)
    for folder in others[: max(0, len(others) - max(0, max_to_keep - 1))]:
        doomed = root / f"{_DOOMED}{folder.name}"
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

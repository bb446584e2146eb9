"""Deletes snapshot files that no replica will ask for again. An engine that has a deleted file mapped keeps reading it until it is done."""

from __future__ import annotations

from pathlib import Path

from streamrl.weights.files import version_of

KEPT_VERSIONS = 2  # the newest, and the one before it, which a replica may be loading while the newest is being published


def retire_snapshots(folder: Path, keep: int = KEPT_VERSIONS) -> list[Path]:
    """Delete all but the ``keep`` newest versions under ``folder``; the deleted paths, oldest first. Other files are left alone."""
    held = sorted((version, path) for path in folder.glob("v*.weights") if (version := version_of(path)) is not None)
    gone = [path for _, path in held[: max(0, len(held) - keep)]]
    for path in gone:
        path.unlink(missing_ok=True)
    return gone

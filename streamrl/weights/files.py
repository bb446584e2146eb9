"""Names and digests of snapshot files. Needs no torch, so that processes which only watch versions can use it.

One file per version, ``v000012.weights``: a path never changes its content, so nothing that caches by path can hand out old weights.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

_PATTERN = re.compile(r"^v(\d{6,})\.weights$")
DIGEST_BYTES = 16


def snapshot_path(folder: Path, version: int) -> Path:
    """The file of ``version``; version 12 lies in ``v000012.weights``."""
    return folder / f"v{version:06d}.weights"


def version_of(path: Path) -> int | None:
    """The version a snapshot file holds; None for any other file."""
    match = _PATTERN.match(path.name)
    return int(match.group(1)) if match else None


def digest(data: bytes | memoryview) -> str:
    """Hash of one tensor's raw bytes: blake2b, 16 bytes, hex."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()

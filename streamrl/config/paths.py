"""Paths as users write them in a configuration, made absolute. Knows nothing about what lies at a path."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE_PREFIX = "${streamrl}"
LOCAL_PREFIX = "file://"


def resolve(path: str) -> str:
    """``path`` as an absolute path; ``${streamrl}`` at the start is the installed package's folder, ``~`` the home folder.

    >>> resolve("${streamrl}/assets/tiny/val.parquet").endswith("streamrl/assets/tiny/val.parquet")
    True
    """
    if path.startswith(PACKAGE_PREFIX):
        return str(Path(__file__).resolve().parents[1]) + path[len(PACKAGE_PREFIX) :]
    return str(Path(path).expanduser().absolute())


def is_url(path: str) -> bool:
    """Whether ``path`` names a remote source, such as ``s3://bucket/a.parquet`` or ``simplecache::https://host/a.json``; ``file://`` is local."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)", path) is not None and not path.startswith(LOCAL_PREFIX)


def resolve_source(path: str) -> str:
    """Like :func:`resolve` for a data file: a URL stays as it is, ``file://`` is dropped."""
    return path if is_url(path) else resolve(path.removeprefix(LOCAL_PREFIX))


def resolve_model(path: str) -> str:
    """Like :func:`resolve` for a model: a path that is no folder and looks like a hub id (``owner/name``) stays as it is."""
    resolved = resolve(path)
    looks_like_hub_id = path.count("/") <= 1 and not path.startswith((".", "/", "~", PACKAGE_PREFIX))
    return path if looks_like_hub_id and not Path(resolved).is_dir() else resolved

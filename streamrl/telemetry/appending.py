"""Appending to a file on a disk that may be full: all of a piece gets there, or nothing of it."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path


def append_whole(handle: int, data: bytes, path: Path) -> None:
    """One write to ``handle``, the open end of ``path``. OSError names the file when it does not take all of ``data``; the file is then as it was."""
    before = os.fstat(handle).st_size
    try:
        if os.write(handle, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, before)
        raise OSError(error.errno, error.strerror, str(path)) from error

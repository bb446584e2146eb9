"""Where a data file lies on this machine: a local path as it is, a remote one as a copy in the cache.

A copy appears under its name only when it is whole (written aside, then renamed), so any number of processes may ask for one file at once:
each finds the whole copy or makes it, and the last rename replaces equal bytes. A source that tells its size, time or tag and changes gets
a new copy beside the old one, which readers may still hold; old copies are never removed here. A source that tells nothing is copied once.
What a killed process left half written is removed before the next copy; its lock tells that it is dead, so nothing is removed where files can't
be locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streamrl.config.data import DEFAULT_CACHE_DIR
from streamrl.config.paths import is_url, resolve, resolve_source
from streamrl.errors import DataError, MissingFile

# What file systems call the things that change with the content.
_STAMPS = ("size", "mtime", "modified", "last_modified", "LastModified", "updated", "created", "etag", "ETag", "md5Hash", "checksum", "generation")
_PART = ".part-"  # begins the name of what is being written
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})  # while copying, these come from the cache and not from the source


def copy_to_local(src: str, cache_dir: str | None = None) -> str:
    """The local path of ``src``; a URL that fsspec knows (s3://, https://, memory://, ...) is copied into ``cache_dir`` and reused.

    MissingFile (a FileNotFoundError) with ``src`` as given when there is no such file, DataError when the source cannot be read.
    """
    if is_url(src):
        return str(_cached(src, Path(resolve(cache_dir or DEFAULT_CACHE_DIR))))
    path = resolve_source(src)
    if os.path.isdir(path):
        raise DataError(f"data files are files, got the folder {src}; list the files in it")
    if not os.path.isfile(path):  # unlike Path.is_file, False also in a folder that may not be read
        looked = "" if src == path else f" (looked for {path})"
        raise MissingFile(f"data files must exist and be readable, got {src}{looked}; correct the path or make the file")
    return path


def suffix_of(src: str) -> str:
    """``.parquet`` of a path or URL, in lower case; a URL's query is not looked at."""
    return Path(re.split(r"[?#]", src)[0] if is_url(src) else src).suffix.lower()


def _cached(src: str, cache: Path) -> Path:
    from fsspec.core import url_to_fs  # 0.1 s that a run with local files need not pay

    try:
        fs, path = url_to_fs(src)
        info = fs.info(path)
        if info.get("type") == "directory":
            raise DataError(f"data files are files, got the folder {src}; list the files in it")
        copy = cache / _name(src, info)
        with _cache_errors(cache):
            missing = not copy.is_file()
        if missing:
            _copy(fs, path, copy, info.get("size"))
    except DataError:
        raise
    except FileNotFoundError as error:
        raise MissingFile(f"data files must exist and be readable, got {src} ({error}); correct the URL or make the file") from error
    except Exception as error:  # network clients raise anything, a missing one is an ImportError that says what to install
        raise DataError(f"data files must be readable at their source, got {type(error).__name__}: {error} for {src}; correct the URL or access") from error
    return copy


def _name(src: str, info: dict[str, Any]) -> str:
    """Name of the copy: URL, what the source tells of its content, and the end of the file's own name, whose suffix readers need."""
    stamp = repr([(key, str(info[key])) for key in _STAMPS if info.get(key) is not None])
    own = re.sub(r"[^\w.-]", "_", re.split(r"[?#]", src)[0].rsplit("/", 1)[-1])
    return f"{hashlib.sha256(src.encode()).hexdigest()[:24]}-{hashlib.sha256(stamp.encode()).hexdigest()[:16]}-{own[-80:]}"


def _copy(fs: Any, path: str, copy: Path, size: int | None) -> None:
    with _cache_errors(copy.parent):
        copy.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(copy.parent)
        handle, aside = _locked_part(copy.parent)
    try:
        with _cache_errors(copy.parent, _NO_ROOM):
            fs.get_file(path, str(aside))
        got = os.path.getsize(aside)
        if size is not None and got != size:
            raise DataError(f"a copy has the size of its source ({size} bytes), got {got} bytes of {path}; it changed or was cut short, try again")
        with _cache_errors(copy.parent):
            os.replace(aside, copy)
    finally:
        aside.unlink(missing_ok=True)
        os.close(handle)


def _locked_part(cache: Path) -> tuple[int, Path]:
    """A new file of the process's own, with the mode of other files, locked for as long as its handle is open."""
    while True:
        path = cache / f"{_PART}{uuid.uuid4().hex}"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        if path.exists():  # else it was taken for abandoned before it was locked
            return handle, path
        os.close(handle)


def _remove_abandoned(cache: Path) -> None:
    for path in cache.glob(f"{_PART}*"):
        with contextlib.suppress(OSError), path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its writer lives
            path.unlink()


@contextlib.contextmanager
def _cache_errors(cache: Path, numbers: frozenset[int] | None = None) -> Iterator[None]:
    """An OSError (of these numbers; None: any) as a DataError that names the cache and not the source."""
    try:
        yield
    except OSError as error:
        if numbers is not None and error.errno not in numbers:
            raise
        what = error.strerror or error
        raise DataError(f"data.cache_dir takes copies of remote files, got {what} in {cache}; make room or set it to a folder that can be written") from error

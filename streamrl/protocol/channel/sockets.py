"""Unix sockets below a folder of any length, readable by this user only, and not kept alive by forked children.

The kernel takes at most 107 bytes of path; a run folder can be longer. So both sides open the folder and go through ``/proc/self/fd``. A socket is
bound aside and renamed, so that its name leads to a dead predecessor or to its successor, never to nothing. Needs Linux.

A child that was forked without exec would hold its parent's sockets, and nobody would notice the parent's death: such a child lets go of them.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

BACKLOG = 512

_OPEN: Counter[int] = Counter()  # descriptors that no child may keep; counted, since a number may be in use again before its former owner hears of its end


def listen(path: Path) -> socket.socket:
    """A listening socket under ``path`` (mode 0600, its folder 0700), in place of whatever was there. OSError where a socket cannot be."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    listener = _socket()
    try:
        with _folder(path) as (folder, near):
            os.fchmod(folder, 0o700)
            aside = f".{path.name}.{os.getpid()}"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(aside, dir_fd=folder)
            listener.bind(f"{near}/{aside}")
            os.chmod(aside, 0o600, dir_fd=folder)
            listener.listen(BACKLOG)
            os.rename(aside, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        listener.close()
        raise
    not_for_children(listener.fileno())
    return listener


def connect(path: Path) -> socket.socket:
    """A connected socket. BlockingIOError when the listener is there but has no room for the moment, another OSError when nobody listens."""
    sock = _socket()
    try:
        with _folder(path) as (_, near):
            sock.connect(f"{near}/{path.name}")
    except BaseException:
        sock.close()
        raise
    return sock


def not_for_children(descriptor: int) -> int:
    """Remember it until ``closed``."""
    _OPEN[descriptor] += 1
    return descriptor


def closed(descriptor: int) -> None:
    _OPEN.subtract([descriptor])
    if _OPEN[descriptor] <= 0:
        del _OPEN[descriptor]


def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    return sock


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[tuple[int, str]]:
    """The open folder of ``path``, and a short path to it."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield folder, f"/proc/self/fd/{folder}"
    finally:
        os.close(folder)


def _let_go() -> None:
    """In a forked child. The numbers stay taken, since copies of the parent's objects may close them later."""
    if not _OPEN:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in _OPEN:
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
    _OPEN.clear()


os.register_at_fork(after_in_child=_let_go)

"""Standard logging with the actor, the weight version and the group in every line, in one file an actor.

Third-party loggers go to the same file. Knows no configuration; prompts and tokens belong to DEBUG, which is the caller's business.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

_VERSION: ContextVar[str] = ContextVar("streamrl_log_version", default="-")
_GROUP: ContextVar[str] = ContextVar("streamrl_log_group", default="-")
_FORMAT = "%(asctime)s %(levelname)-7s %(actor)s v%(version)s %(group)s %(name)s: %(message)s"


def setup(actor: str, *, file: Path | None = None, level: str = "INFO", console: bool = False) -> None:
    """Send this process's logs to ``file``, and to stderr with ``console``. Calling again replaces what an earlier call set up."""
    handlers: list[logging.Handler] = []
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(_File(file, encoding="utf-8"))
    if console:
        handlers.append(logging.StreamHandler(sys.stderr))
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if any(isinstance(f, _Context) for f in handler.filters)]:
        root.removeHandler(old)
        with suppress(OSError):  # of a full disk
            old.close()
    for handler in handlers:
        handler.addFilter(_Context(actor))
        handler.setFormatter(logging.Formatter(_FORMAT))
        root.addHandler(handler)
    root.setLevel(logging.WARNING)  # third parties speak up only when something is wrong
    for ours in ("streamrl", "actors"):
        logging.getLogger(ours).setLevel(level)


@contextmanager
def context(*, version: int | None = None, group: str | None = None) -> Iterator[None]:
    """Lines written inside carry these; tasks started inside inherit them."""
    tokens = [(var, var.set(str(value))) for var, value in ((_VERSION, version), (_GROUP, group)) if value is not None]
    try:
        yield
    finally:
        for var, token in reversed(tokens):
            var.reset(token)


class _File(logging.FileHandler):
    """On a disk that takes no line says so once, and drops lines until it does."""

    is_told = False

    def handleError(self, record: logging.LogRecord) -> None:  # the name is logging's
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.is_told:
            self.is_told = True
            with suppress(OSError):  # it may be on the same disk
                sys.stderr.write(f"{self.baseFilename} can't be written just now ({error.strerror or error}); the process goes on, lines are dropped\n")


class _Context(logging.Filter):
    """Adds the fields of the format to a record."""

    def __init__(self, actor: str) -> None:
        super().__init__()
        self._actor = actor

    def filter(self, record: logging.LogRecord) -> bool:
        record.actor, record.version, record.group = self._actor, _VERSION.get(), _GROUP.get()
        return True

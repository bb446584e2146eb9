"""``streamrl VERB ...``: picks the verb and turns its end into an exit code.

Exit codes: 0 done, 1 the run failed, 2 the user's mistake (one line on stderr, nothing was trained), 130 stopped or interrupted, 141 the reader
of stdout went away. A file that can't be read or written is the user's mistake too, but in a launch, where its place matters. Errors that are
neither of our tree nor of the system travel with their traceback. Text that the terminal's encoding lacks is written as escapes.
Imports no verb's machinery, so ``--help`` is instant.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
from collections.abc import Sequence

from streamrl import __version__
from streamrl.cli import audit, check, eval, export, inspect, launch, report, status, top, why
from streamrl.errors import CheckpointError, RunFailed, StreamrlError, UsageError

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the exit code."""
    arguments = parse(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
        return 141
    except OSError as error:
        _forget_stdout()
        return _say(f"a command reads its files and writes to stdout, got {error}; correct the path, its permissions or make room", 2)
    return code


def _run(arguments: argparse.Namespace) -> int:
    try:
        return int(arguments.run(arguments))
    except UsageError as error:
        return _say(error, 2)
    except CheckpointError as error:
        if arguments.verb == "launch":
            log.error("%s", type(error).__name__, exc_info=error)
        return _say(error, 1 if arguments.verb == "launch" else 2)
    except StreamrlError as error:
        if not isinstance(error, RunFailed):
            log.error("%s", type(error).__name__, exc_info=error)  # RunFailed is the whole message; of others the place matters too
        return _say(error, 1)
    except OSError as error:
        if arguments.verb != "launch":
            raise
        log.error("%s", type(error).__name__, exc_info=error)
        return _say(f"the run failed: {error}", 1)
    except KeyboardInterrupt:
        sys.stderr.write("streamrl: interrupted\n")
        return 130


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options may stand anywhere among files and overrides, which argparse alone doesn't allow for a list of free words."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(arguments, "settings") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.settings = [*arguments.settings, *rest]
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """All verbs with their options."""
    parser = argparse.ArgumentParser(prog="streamrl", description="Asynchronous streaming RL trainer for language models.")
    parser.add_argument("--version", action="version", version=f"streamrl {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in (launch, check, status, top, why, report, inspect, audit, export, eval):
        verb.add_parser(verbs)
    return parser


def _forget_stdout() -> None:
    """What is left in the buffer goes nowhere, so that Python's own flush at the end doesn't fail again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(error: Exception | str, code: int) -> int:
    sys.stderr.write(f"streamrl: {' '.join(str(error).split())}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())

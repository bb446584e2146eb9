"""Main program of a reward worker: reads calls from stdin, writes replies to its former stdout. Ends when stdin closes.

What the function prints goes to stderr, so that it cannot disturb the replies. The parent owns all limits: this process has none.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any, BinaryIO

import msgspec

from streamrl.rewards.load import load_function
from streamrl.rewards.worker import HEADER_BYTES, Call, Reply

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def answer(call: Call) -> bytes:
    """The encoded reply to an import or a call. Whatever the function raises is the parent's to judge."""
    try:
        function = load_function(call.target)
        return msgspec.msgpack.encode(Reply(plain(function(*call.args))) if call.args is not None else Reply())
    except Exception as error:  # the edge of this process
        return msgspec.msgpack.encode(Reply(error=f"{type(error).__name__}: {error}"))


def plain(value: Any) -> Any:
    """Numpy and torch scalars as Python numbers; a type that cannot cross the pipe raises."""
    return msgspec.to_builtins(value, enc_hook=lambda item: item.item())


def end_with_parent() -> None:
    """Linux: the kernel kills this process when its parent dies. A closed stdin alone would not end a function that never returns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(calls: BinaryIO, replies: BinaryIO) -> None:
    while header := calls.read(HEADER_BYTES):
        call = msgspec.msgpack.decode(calls.read(int.from_bytes(header, "big")), type=Call)
        payload = answer(call)
        replies.write(len(payload).to_bytes(HEADER_BYTES, "big") + payload)
        replies.flush()


if __name__ == "__main__":
    end_with_parent()
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of the function end in the log
    serve(sys.stdin.buffer, replies)

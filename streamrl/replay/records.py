"""The records of the journal and the calls they stand for.

A file is one Opening and then Calls. A call and the fates it caused are one record, so a killed writer leaves both or neither. Arguments are kept
as msgpack and decoded by the types in ``CALLS``, which also lists every call that changes a replay buffer.
"""

from __future__ import annotations

from typing import Any

import msgspec

from streamrl.config.filter_groups import FilterGroups
from streamrl.config.rollout import ReplayConfig
from streamrl.errors import ProtocolError
from streamrl.protocol.groups import LeaseReply, SessionPush, SpentTokens, TakenBatch
from streamrl.protocol.trajectory import Prompt
from streamrl.replay.fates import Fate
from streamrl.replay.state import BufferState

CALLS: dict[str, Any] = {  # name -> types of the arguments
    "admit": tuple[list[Prompt]],
    "end_of_prompts": tuple[()],
    "lease": tuple[str, int],
    "push": tuple[SessionPush],
    "heartbeat": tuple[str],
    "give_back": tuple[str, list[tuple[str, int]]],
    "spent": tuple[str, list[SpentTokens]],
    "release_worker": tuple[str],
    "take": tuple[int],
    "check_bound": tuple[int],
    "commit": tuple[int, list[str], bool],
    "skip": tuple[int],
    "abandon": tuple[int],
    "published": tuple[int],
    "new_learner": tuple[()],
    "checkpointed": tuple[int],
    "rollback": tuple[int | None, int | None],
    "give_up": tuple[list[str]],
    "forget_missing": tuple[list[str]],
    "restarted": tuple[()],
    "recovered": tuple[()],
    "expire": tuple[()],
    "close": tuple[()],
    "collect_garbage": tuple[()],
    "garbage_cleared": tuple[list[str]],
}
REPLIES: dict[str, Any] = {  # calls that hand something out: a repeat of the request must get the same again -> type of the result
    "admit": list[int],
    "lease": LeaseReply,
    "spent": int,
    "release_worker": int,
    "take": TakenBatch,
    "check_bound": list[str],
}


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """One call that changed the buffer, or was refused."""

    name: str
    arguments: msgspec.Raw
    at: float  # the buffer's clock, seconds
    request: str | None = None  # of calls in REPLIES that came through a channel
    fault: str | None = None  # class of the error it ended with
    fates: list[Fate] = []


class Reply(msgspec.Struct, array_like=True):
    """An answer that may be asked for again."""

    request: str
    name: str
    result: msgspec.Raw


class BufferSpec(msgspec.Struct, frozen=True):
    """What a buffer is made from."""

    config: ReplayConfig
    groups_per_step: int
    n: int
    group_estimator: bool = True
    filter_groups: FilterGroups = FilterGroups()


class Opening(msgspec.Struct, array_like=True, tag="state"):
    """Everything known when the file began: recovery needs no older file. ``anew``: this life began here, empty or with a snapshot; what older files
    say is not part of it."""

    spec: BufferSpec
    at: float
    anew: bool
    state: BufferState
    replies: list[Reply]


ENCODER = msgspec.msgpack.Encoder()
_ARGUMENTS = {name: msgspec.msgpack.Decoder(types) for name, types in CALLS.items()}
_RESULTS = {name: msgspec.msgpack.Decoder(types) for name, types in REPLIES.items()}
_RECORD = msgspec.msgpack.Decoder(Call | Opening)


def read_record(payload: bytes) -> Call | Opening:
    """ProtocolError for anything else than a record of this version."""
    try:
        return _RECORD.decode(payload)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a replay journal holds calls and states, got a record that is neither ({error}); it was written by another version") from error


def arguments_of(call: Call) -> tuple[Any, ...]:
    """The arguments as the method takes them."""
    if call.name not in _ARGUMENTS:
        raise ProtocolError(f"a replay journal holds the calls {sorted(CALLS)}, got {call.name!r}; it was written by another version")
    try:
        return tuple(_ARGUMENTS[call.name].decode(call.arguments))
    except msgspec.MsgspecError as error:
        raise ProtocolError(
            f"a call in a replay journal has the arguments of its name, got {error} for {call.name}; it was written by another version"
        ) from error


def result_of(reply: Reply) -> Any:
    return _RESULTS[reply.name].decode(reply.result)

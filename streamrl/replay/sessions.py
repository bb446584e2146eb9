"""What a pushed session must look like, checked before anything changes."""

from __future__ import annotations

from typing import Any

import msgspec

from streamrl.errors import ProtocolError
from streamrl.protocol.groups import DROP_REASONS, SessionPush
from streamrl.protocol.keys import TrajectoryKey
from streamrl.replay.groups import Group

_REASONS = frozenset(DROP_REASONS)


def checked_session(session: SessionPush, group: Group, n: int, newest_version: int) -> SessionPush:
    """The session with its rows in order of their index. ProtocolError when it isn't one of this attempt's sessions, or its rows are malformed or of
    a version above ``newest_version``, which no engine can hold: they would count as fresh for ever."""
    where = f"session {session.session_id} of {session.uid}"
    if session.attempt > group.attempt:
        raise ProtocolError(f"an attempt is leased before it is pushed, got attempt {session.attempt} of {session.uid} at attempt {group.attempt}; lease first")
    if not 0 <= session.session_id < n:
        raise ProtocolError(f"session ids run from 0 to n-1 = {n - 1}, got {where}; number the sessions of a group from 0")
    if session.reason is not None:
        return _checked_failure(session, where)
    if not session.keys or len(session.keys) != len(session.tags):
        raise ProtocolError(
            f"a good session has rows and one tag per key, got {len(session.keys)} keys and {len(session.tags)} tags in {where}; push them together"
        )
    places = [_row_index(key, session, where) for key in session.keys]
    if len(set(places)) != len(places):
        raise ProtocolError(f"keys of a session are distinct, got {session.keys} in {where}; count the rows of a session from 0")
    for key, tag in zip(session.keys, session.tags, strict=True):
        _check_tag(key, tag, newest_version)
    if places == sorted(places):
        return session
    order = sorted(range(len(places)), key=places.__getitem__)
    return msgspec.structs.replace(session, keys=[session.keys[i] for i in order], tags=[session.tags[i] for i in order])


def oldest_version(session: SessionPush) -> int | None:
    """Oldest weight version among the session's rows; None for a failed session."""
    return min((tag["min_global_steps"] for tag in session.tags), default=None)


def _checked_failure(session: SessionPush, where: str) -> SessionPush:
    if session.reason not in _REASONS:
        raise ProtocolError(f"a failed session has one of the reasons {sorted(_REASONS)}, got {session.reason!r} in {where}; use the nearest one")
    if session.keys:
        raise ProtocolError(f"a failed session has no rows, got {len(session.keys)} keys and reason {session.reason!r} in {where}; leave the keys out")
    return session


def _row_index(key: str, session: SessionPush, where: str) -> int:
    parsed = TrajectoryKey.parse(key)
    if parsed.uid != session.uid or parsed.session_id != session.session_id:
        raise ProtocolError(f"keys of a session read uid_session_index, got {key!r} in {where}; build them with TrajectoryKey")
    return parsed.index


def _check_tag(key: str, tag: dict[str, Any], newest_version: int) -> None:
    for name in ("response_len", "min_global_steps"):
        value = tag.get(name)
        if type(value) is not int or value < 0:
            raise ProtocolError(f"a row's tag carries {name} as a number >= 0, got {value!r} at {key}; make tags with trajectory_tag")
    version = max(version for name in ("min_global_steps", "max_global_steps") if type(version := tag.get(name)) is int)
    if version > newest_version:
        raise ProtocolError(
            f"tokens come from a version that was handed to a publication, got {version} at {key} where the newest is {newest_version}; "
            "engines change their version by update_weights only"
        )

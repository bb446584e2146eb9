"""Names of rows. A trajectory's key is ``{uid}_{session_id}_{index}``; this module alone formats and parses it.

``uid`` names the prompt (= group), ``session_id`` counts the n samples of it, ``index`` counts the rows one session produced.
"""

from __future__ import annotations

import hashlib
import re
import uuid

import msgspec

from streamrl.errors import ProtocolError

_UID = re.compile(r"[A-Za-z0-9.-]+")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")  # fits 64 bits


def check_uid(uid: str) -> str:
    """``uid`` itself when it matches ``[A-Za-z0-9.-]+``; ProtocolError otherwise (an underscore would make keys ambiguous)."""
    if not isinstance(uid, str) or not _UID.fullmatch(uid):
        raise ProtocolError(f"a uid consists of letters, digits, '.' and '-' (no underscore) and is not empty, got {uid!r}; choose another uid")
    return uid


def prompt_uid(run_seed: int, epoch: int, position: int) -> str:
    """The uid of the prompt at ``position`` of ``epoch``'s order: a hash in uuid form, equal in every run with this seed."""
    digest = hashlib.blake2b(f"{run_seed}:{epoch}:{position}".encode(), digest_size=16).digest()
    return str(uuid.UUID(bytes=digest))


def request_seed(run_seed: int, uid: str, session_id: int, retry: int) -> int:
    """63-bit sampling seed of one session. ``retry`` counts repeats after a *failed session* only, so a group that is issued
    again after a crash or an expired lease reproduces its tokens on a deterministic engine."""
    digest = hashlib.blake2b(f"{run_seed}:{uid}:{session_id}:{retry}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class TrajectoryKey(msgspec.Struct, frozen=True, order=True):
    """Key of one row.

    >>> str(TrajectoryKey("a1", 2, 0))
    'a1_2_0'
    >>> TrajectoryKey.parse("a1_2_0").session_id
    2
    """

    uid: str
    session_id: int
    index: int

    def __post_init__(self) -> None:
        check_uid(self.uid)
        if type(self.session_id) is not int or type(self.index) is not int or self.session_id < 0 or self.index < 0:
            raise ProtocolError(f"session_id and index are int and not negative, got session_id={self.session_id!r}, index={self.index!r}; count from 0")

    def __str__(self) -> str:
        return f"{self.uid}_{self.session_id}_{self.index}"

    @classmethod
    def parse(cls, key: str) -> TrajectoryKey:
        """Split off the last two underscores; both numbers are non-negative decimals without leading zeros."""
        parts = key.rsplit("_", 2) if isinstance(key, str) else []
        if len(parts) != 3 or not _NUMBER.fullmatch(parts[1]) or not _NUMBER.fullmatch(parts[2]):
            raise ProtocolError(f"a trajectory key reads uid_session_index with two non-negative numbers, got {key!r}; build keys with TrajectoryKey")
        return cls(parts[0], int(parts[1]), int(parts[2]))

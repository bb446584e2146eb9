"""Records in an append-only file: length, checksum, bytes. What a killed writer left half written at the end is recognised and cut off.

    file = magic (8 bytes) | record ...        record = length u32 | crc32 u32 | payload

``append`` hands the record to the operating system before it returns, so it survives the death of every process, not of the machine; ``sync``
does the rest. Knows nothing of what the payloads mean.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from streamrl.errors import ProtocolError

log = logging.getLogger(__name__)

MAGIC = b"strljrn1"
MAX_RECORD_BYTES = 1 << 30
_HEAD = struct.Struct("<II")


class RecordWriter:
    """The one writer of ``path``; the file is made when there is none. A torn end is cut off first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        end = _sound_bytes(path) if path.exists() else 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if end < len(MAGIC):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, MAGIC, 0)
            end = len(MAGIC)
        os.ftruncate(self._fd, end)
        os.lseek(self._fd, end, os.SEEK_SET)
        self.size_bytes = end

    def append(self, *payloads: bytes) -> None:
        """All of them in one write."""
        data = b"".join(_HEAD.pack(len(payload), zlib.crc32(payload)) + payload for payload in payloads)
        written = os.write(self._fd, data)
        if written != len(data):  # a full device: what is there of the record would hide all later ones
            os.ftruncate(self._fd, self.size_bytes)
            os.lseek(self._fd, self.size_bytes, os.SEEK_SET)
            raise OSError(28, f"no room for a record of {len(data)} bytes", str(self.path))
        self.size_bytes += written

    def sync(self) -> None:
        """Survives the machine from here on."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_records(path: Path) -> Iterator[bytes]:
    """The payloads in order. A torn last record is left out with a warning; ProtocolError for damage that is followed by more records."""
    data = path.read_bytes()
    if not data.startswith(MAGIC):
        if len(data) < len(MAGIC):
            return  # killed while the file was made
        raise ProtocolError(f"a record file begins with {MAGIC!r}, got {data[: len(MAGIC)]!r} in {path}; it is another kind of file")
    place = len(MAGIC)
    while place < len(data):
        payload = _record_at(data, place)
        if payload is None:
            _check_torn(data, place, path)
            return
        yield payload
        place += _HEAD.size + len(payload)


def _record_at(data: bytes, place: int) -> bytes | None:
    """The payload at ``place``, None when it is cut short or does not match its checksum."""
    if place + _HEAD.size > len(data):
        return None
    length, checksum = _HEAD.unpack_from(data, place)
    payload = data[place + _HEAD.size : place + _HEAD.size + length]
    return payload if len(payload) == length and zlib.crc32(payload) == checksum else None


def _check_torn(data: bytes, place: int, path: Path) -> None:
    """A torn end reaches to the end of the file; damage before that is not the work of a kill."""
    length = _HEAD.unpack_from(data, place)[0] if place + _HEAD.size <= len(data) else MAX_RECORD_BYTES
    if place + _HEAD.size + length < len(data):
        raise ProtocolError(f"records match their checksums, got a damaged one at byte {place} of {path} with more behind it; restore the file from a copy")
    log.warning("%s ends in a record that was not written whole (%d bytes); it is left out", path, len(data) - place)


def _sound_bytes(path: Path) -> int:
    """Where the whole records end."""
    return sum((_HEAD.size + len(payload) for payload in read_records(path)), len(MAGIC)) if path.stat().st_size >= len(MAGIC) else 0

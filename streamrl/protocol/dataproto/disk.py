"""A value in a file of its own: what ``codec.py`` writes, then a CRC-32 of it, so that damage inside a buffer is found too.

A write is whole or not at all. The check is against damage, not against forgery; the codec gives data only, whoever wrote the file.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from streamrl.errors import ProtocolError
from streamrl.protocol import codec

_CHECKSUM = struct.Struct("<I")


def save(value: Any, path: Path) -> None:
    """Write ``value`` aside and rename it to ``path``."""
    aside = Path(f"{path}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            write(value, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write(value: Any, file: BinaryIO) -> None:
    """``value`` and its checksum."""
    checksum = 0
    for part in codec.encode_parts(value):
        checksum = zlib.crc32(part, checksum)
        file.write(part)
    file.write(_CHECKSUM.pack(checksum))


def load(path: Path) -> Any:
    """What :func:`save` or :func:`write` wrote; ProtocolError names a file that is damaged or was written by something else."""
    raw = memoryview(path.read_bytes())
    body, tail = raw[: -_CHECKSUM.size], raw[-_CHECKSUM.size :]
    if len(raw) < _CHECKSUM.size or zlib.crc32(body) != _CHECKSUM.unpack(tail)[0]:
        raise ProtocolError(f"a saved batch ends with its checksum, got {len(raw)} bytes of which it is not in {path}; the file is damaged or foreign")
    return codec.decode(body)

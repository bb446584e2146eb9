"""Reads a long recording with fewer scrapes: days of them would take minutes to parse and a gigabyte to hold, and a chart has 600 points.

Guarantees: at most about ``MAX_SCRAPES`` are read, evenly over the run, the first and the last among them. Counters, rates and totals lose nothing by
that but restarts between two scrapes that are read; of a gauge, what it was in between isn't seen.
"""

from __future__ import annotations

from streamrl.telemetry.recording import Recording, read_blocks, recording_paths
from streamrl.telemetry.run_folder import RunFolder

MAX_SCRAPES = 8640  # half a day at one every 5 s; about 15 s of reading
_MEMBER = b"\x1f\x8b\x08"  # each scrape is a gzip member, which begins so; by chance it stands about once in 16 MB


def read_thinned(folder: RunFolder, limit: int = MAX_SCRAPES) -> tuple[Recording, int]:
    """The recording, and of how many scrapes one was read (1: all)."""
    paths = recording_paths(folder)
    stride = max(1, -(-sum(path.read_bytes().count(_MEMBER) for path in paths if path.exists()) // limit))
    recording, place, skipped = Recording(), 0, ("", "")
    for path in paths:
        for text in read_blocks(path, recording.warnings):
            if _is_end_mark(text):
                continue
            if place % stride == 0:
                _add(recording, text, path.name)
            skipped = (text, path.name) if place % stride else ("", "")
            place += 1
    if skipped[0]:
        _add(recording, *skipped)
    return recording, stride


def _is_end_mark(text: str) -> bool:
    """What an orderly end writes: no samples, only comments."""
    return text.rstrip("\n").rpartition("\n")[2].startswith("#")


def _add(recording: Recording, text: str, file: str) -> None:
    try:
        recording.add(text, file=file)
    except ValueError as error:
        recording.warnings.append(f"{file} has a scrape that is not of this recorder ({error}); it is left out")

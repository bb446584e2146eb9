"""The recording of a run, read back: every series of every actor, as ``recorder.py`` wrote it.

    metrics/recording-000001.om.gz     one gzip member a scrape: OpenMetrics lines with the labels run, role, actor and the scrape's time
    metrics/recording-000002.om.gz     the next file, after a rotation or a resume

Guarantees: what a crash cut off costs that scrape alone, and ``Recording.warnings`` names it; the scrapes are in ascending time; a series has one
value a scrape at most. A restarted actor goes on in the same series, and its counters fall to 0; an actor that is gone leaves a gap.
Beside the actors' own metrics there is ``up``, as Prometheus has it: 1 for a page that answered, 0 for one that did not.
Knows no catalogue: what a name means is said by ``kinds``, as the pages declare it. It holds what it reads in memory, 16 bytes a sample.
"""

from __future__ import annotations

import re
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.telemetry.run_folder import RunFolder

_NAME = re.compile(r"recording-(\d{6,})\.om\.gz")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
_GZIP = 31  # zlib's name for "one gzip member, checksum included"
_CHUNK_BYTES = 1 << 16
SLACK_S = 60.0  # between a scrape and when its file says that it was written


@dataclass(frozen=True)
class Recorded:
    """One series: ``values[i]`` at ``times[i]`` (unix seconds, ascending). ``labels`` are those of the page, with run, role and actor."""

    labels: dict[str, str]
    times: array[float]
    values: array[float]


@dataclass
class Recording:
    """Everything that was read. ``kinds`` and ``helps`` go by family: ``streamrl_groups_dropped`` is a counter, its samples end in ``_total``."""

    times: list[float] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    helps: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    _series: dict[str, dict[str, Recorded]] = field(default_factory=dict)  # sample name -> the series as written -> its samples

    def series(self, metric: str) -> Iterator[Recorded]:
        """The series of a sample name as on the page: ``streamrl_x_total``, ``streamrl_h_bucket``, ``streamrl_h_sum``. None for an unknown name."""
        yield from self._series.get(metric, {}).values()

    def metrics(self) -> list[str]:
        """All sample names, sorted."""
        return sorted(self._series)

    def actors(self) -> dict[str, str]:
        """Actor -> role, of everybody who was ever a target."""
        return {one.labels["actor"]: one.labels["role"] for one in self.series("up")}

    def add(self, block: str, *, since: float = 0.0, only: Collection[str] | None = None, file: str = "a page") -> None:
        """The lines of one scrape. Its samples have one time, later than that of the scrape before, or the scrape is left out with a warning."""
        lines = block.split("\n")[:-1]
        for line in lines:
            if line.startswith("#"):
                self._describe(line)
        if not lines or lines[-1].startswith("#"):
            return  # the end mark
        time = float(lines[-1].rpartition(" ")[2])
        if time < since:
            return
        if self.times and time <= self.times[-1]:
            self.warnings.append(f"{file} has a scrape at {time:.3f}, which is not later than the one before; it is left out: the clock was set back")
            return
        self.times.append(time)
        for line in lines:
            if not line.startswith("#"):
                self._append(line, time, only)

    def forget(self, before: float) -> None:
        """Drop what is older than ``before``; for those who add scrapes for ever."""
        del self.times[: bisect_left(self.times, before)]
        for name, of_name in self._series.items():
            for one in of_name.values():
                old = bisect_left(one.times, before)
                del one.times[:old], one.values[:old]
            self._series[name] = {key: one for key, one in of_name.items() if one.times}

    def _append(self, line: str, time: float, only: Collection[str] | None) -> None:
        series, value, _ = line.rsplit(" ", 2)
        name = series.partition("{")[0]
        if only is not None and name not in only:
            return
        of_name = self._series.setdefault(name, {})
        found = of_name.get(series)
        if found is None:
            found = of_name[series] = Recorded(parse_labels(series), array("d"), array("d"))
        elif found.times and found.times[-1] == time:
            return
        found.times.append(time)
        found.values.append(float(value))

    def _describe(self, line: str) -> None:
        words = line.split(" ", 3)
        if len(words) == 4 and words[1] in ("TYPE", "HELP"):
            (self.kinds if words[1] == "TYPE" else self.helps)[words[2]] = words[3]


def recording_paths(folder: RunFolder | Path) -> list[Path]:
    """The files of a recording, oldest first; ``folder`` is the run's, or the one that holds the files."""
    place = folder.metrics if isinstance(folder, RunFolder) else folder
    found = [path for path in place.glob("recording-*.om.gz") if _NAME.fullmatch(path.name)] if place.is_dir() else []
    return sorted(found, key=number_of)


def number_of(path: Path) -> int:
    """The place of a file among those of its recording."""
    return int(path.name.removeprefix("recording-").partition(".")[0])


def read_recording(folder: RunFolder | Path, *, since: float = 0.0, only: Collection[str] | None = None) -> Recording:
    """Scrapes at or after ``since`` (unix seconds); ``only`` these sample names. An empty recording when there are no files."""
    recording = Recording()
    for path in recording_paths(folder):
        if last_written(path) < since - SLACK_S:
            continue
        for text in read_blocks(path, recording.warnings):
            try:
                recording.add(text, since=since, only=only, file=path.name)
            except ValueError as error:
                recording.warnings.append(f"{path.name} has a scrape that is not of this recorder ({error}); it is left out")
    return recording


def last_written(path: Path) -> float:
    """When the file was last appended to; 0 when it is gone."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def read_blocks(path: Path, warnings: list[str]) -> Iterator[str]:
    """The scrapes of a file, as text. Stops at the first one that is cut or damaged, and says so in ``warnings``."""
    try:
        with path.open("rb") as file:
            data = b""
            while data := data or file.read(_CHUNK_BYTES):
                member, pieces = zlib.decompressobj(_GZIP), []
                while not member.eof and data:
                    pieces.append(member.decompress(data))
                    data = member.unused_data if member.eof else file.read(_CHUNK_BYTES)
                if not member.eof:
                    warnings.append(f"{path.name} ends in the middle of a scrape, which is left out: the recorder was cut off there, or is writing it")
                    return
                yield b"".join(pieces).decode()
    except FileNotFoundError:
        return  # rotated away just now
    except (zlib.error, UnicodeDecodeError, OSError) as error:
        warnings.append(f"{path.name} is read up to a damaged place ({error}); what follows there is left out")


def parse_labels(series: str) -> dict[str, str]:
    r"""Labels of a series as it is written on a page.

    >>> parse_labels('streamrl_tool_calls_total{tool="say \\"hi\\"",outcome="ok"}')
    {'tool': 'say "hi"', 'outcome': 'ok'}
    """
    return {name: _ESCAPED.sub(lambda at: "\n" if at[1] == "n" else at[1], value) for name, value in _LABEL.findall(series)}

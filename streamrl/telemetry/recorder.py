"""Records every metric of every actor into the run folder, so that a run can be looked at without Prometheus, and after its end.

Every ``interval_s`` all pages are asked for at once (``scrape.py``), and what they say is appended as one gzip member to the newest file of
``metrics/recording-*.om.gz`` (read by ``recording.py``, and turned into one OpenMetrics text by ``openmetrics.py``).

Guarantees: a thread of its own, so that neither a slow page nor a slow disk ever holds up the run, and a hung run is still recorded; a page that
is late counts as no answer; a write that fails (a full disk) is logged once, counted every time, and undone, so that what follows is readable;
a crash costs the scrape under way; all files together stay below ``max_bytes``: the oldest go. A resumed run goes on in a new file.
Every file that was closed in order ends with ``# EOF``: unpacked, it is what ``promtool tsdb create-blocks-from openmetrics`` reads.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from streamrl.telemetry import scrape
from streamrl.telemetry.appending import append_whole
from streamrl.telemetry.metrics import Metrics
from streamrl.telemetry.recording import number_of, recording_paths
from streamrl.telemetry.targets import Target

log = logging.getLogger(__name__)

PAGE_LIMIT_S = 2.0  # a page takes a few ms; one that is later counts as no answer
CLOSE_LIMIT_S = 4.0  # for the last scrape of a run, before its actors are ended
NUM_FILES = 16  # that max_bytes is divided into: so much goes when it is reached, and is unpacked to find the end of a recording
_END = gzip.compress(b"# EOF\n", mtime=0)


class RecordingFiles:
    """The files of a recording, appended to by one writer. None is opened before the first scrape."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._sizes = {path: path.stat().st_size for path in recording_paths(folder)}  # oldest first
        self._file: int | None = None
        self._path = folder
        self._declared: set[str] = set()  # families that the open file describes already

    def append(self, families: dict[str, scrape.Family], time: float) -> None:
        """One scrape as one gzip member. OSError when it can't be written; the file is then as it was."""
        if self._file is None or self._sizes[self._path] >= self._max_bytes // NUM_FILES:
            self._begin()
        declared = set(self._declared)
        member = gzip.compress(scrape.block(families, time, declared).encode(), compresslevel=6, mtime=int(time))
        self._make_room(len(member) + len(_END))
        self._write(member)
        self._declared = declared

    def close(self) -> None:
        """End the open file; what was written stays."""
        if self._file is not None:
            try:
                self._write(_END)
            except OSError:
                log.debug("%s stays without its end mark", self._path)
            os.close(self._file)
            self._file = None

    def _begin(self) -> None:
        self.close()
        number = 1 + max((number_of(path) for path in self._sizes), default=0)
        self._path = self._folder / f"recording-{number:06d}.om.gz"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)
        self._sizes[self._path] = 0
        self._declared = set()

    def _make_room(self, num_bytes: int) -> None:
        """Remove the oldest files until ``num_bytes`` fit under the limit."""
        while sum(self._sizes.values()) + num_bytes > self._max_bytes:
            oldest = next(iter(self._sizes))
            if oldest == self._path:
                raise OSError(f"a scrape of {num_bytes} bytes fits into telemetry.record_max_bytes={self._max_bytes}, got more; raise the limit")
            oldest.unlink(missing_ok=True)
            del self._sizes[oldest]

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        append_whole(self._file, data, self._path)
        self._sizes[self._path] += len(data)


class Recorder:
    """Records until ``close``. ``run`` is the label that tells the runs of one Prometheus apart; faults are counted in ``metrics``."""

    def __init__(self, folder: Path, run: str, metrics: Metrics, *, interval_s: float, max_bytes: int) -> None:
        self._run, self._metrics = run, metrics
        self._interval_s = interval_s
        self._files = RecordingFiles(folder, max_bytes)
        self._targets: tuple[Target, ...] = ()
        self._closing = threading.Event()
        self._wake: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_complained = False
        self._last = 0.0
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)  # must not keep a driver alive that ends at once

    def start(self) -> None:
        self._thread.start()

    def follow(self, targets: Iterable[Target]) -> None:
        """From the next scrape on, these actors are recorded. To be called from any thread."""
        self._targets = tuple(target for target in targets if target.port)

    def close(self, limit_s: float = CLOSE_LIMIT_S) -> None:
        """Scrape once more and end; waits for at most ``limit_s``. Blocks: not for an event loop."""
        self._closing.set()
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None:
            try:
                loop.call_soon_threadsafe(wake.set)
            except RuntimeError:
                return  # it has ended before
        if self._thread.is_alive():
            self._thread.join(limit_s)

    def _work(self) -> None:
        try:
            asyncio.run(self._record())
        except Exception as error:
            self._complain(error)
        finally:
            self._files.close()

    async def _record(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        async with scrape.session() as client:
            while not self._closing.is_set():
                started = time.monotonic()
                await self._round(client)
                try:
                    async with asyncio.timeout(max(0.0, self._interval_s - (time.monotonic() - started))):
                        await self._wake.wait()
                except TimeoutError:
                    continue
            await self._round(client)

    async def _round(self, client: scrape.ClientSession) -> None:
        """One scrape of all actors into the file."""
        if not (targets := self._targets):
            return
        self._last = stamp = max(time.time(), self._last + 0.001)  # a clock that is set back must not make two scrapes one
        try:
            pages = await scrape.fetch_all(client, targets, min(PAGE_LIMIT_S, self._interval_s))
            self._files.append(scrape.merge(self._run, pages), stamp)
        except Exception as error:  # of one scrape: a full disk, a page that is none of ours; telemetry never breaks a run
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        self._metrics.inc("streamrl_telemetry_errors_total", kind="recorder")
        if not self._has_complained:
            self._has_complained = True
            trace = None if isinstance(error, OSError) else error
            log.warning("metrics are not recorded just now (%s); the run goes on, further failures are only counted", error, exc_info=trace)

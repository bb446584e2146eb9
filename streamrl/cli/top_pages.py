"""Where the numbers of ``streamrl top`` come from: the actors' own pages, and the run's recording when no page answers (any more)."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from streamrl.errors import UsageError
from streamrl.telemetry import scrape
from streamrl.telemetry.recording import Recording, read_recording, recording_paths
from streamrl.telemetry.targets import read_targets

if TYPE_CHECKING:
    from streamrl.telemetry.run_folder import RunFolder

PAGE_LIMIT_S = 0.8  # below the refresh: an actor that takes longer shows as silent
KEPT_S = 75.0  # of scrapes: the longest window of a frame, and a little


class Pages:
    """The last minute of a run's metrics. To be entered, and ``look``ed at once a frame."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._live: Recording | None = None
        self._recorded: tuple[object, Recording] | None = None  # with what the files looked like
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Pages:
        self._client = await self._stack.enter_async_context(scrape.session())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def look(self) -> tuple[Recording, bool]:
        """The newest scrapes, and whether they are of the pages themselves. The first frame's rates begin with what was recorded."""
        try:
            targets = read_targets(self._folder.targets)
        except UsageError:
            targets = []
        pages = await scrape.fetch_all(self._client, targets, PAGE_LIMIT_S)
        if all(page is None for page in pages.values()):
            recorded = await asyncio.to_thread(self._from_files)
            seen = self._live.times if self._live is not None else []
            return (self._live if self._live and seen[-1:] > recorded.times[-1:] else recorded), False
        if self._live is None:
            self._live = await asyncio.to_thread(read_recording, self._folder, since=time.time() - KEPT_S)
        now = time.time()
        self._live.add(scrape.block(scrape.merge(self._folder.run_id, pages), now, set()))
        self._live.forget(now - KEPT_S)
        return self._live, True

    def _from_files(self) -> Recording:
        """The last minute that was recorded, read anew when there is more."""
        files = recording_paths(self._folder)
        seen = [(path.name, path.stat().st_size) for path in files[-1:] if path.exists()]
        if self._recorded is None or self._recorded[0] != seen:
            self._recorded = seen, read_last(self._folder, KEPT_S)
        return self._recorded[1]


def read_last(folder: RunFolder, seconds: float) -> Recording:
    """The end of a recording. The files' own times say where that is; of a run folder that was copied, the whole is read."""
    files = recording_paths(folder)
    written = files[-1].stat().st_mtime if files else 0.0
    found = read_recording(folder, since=written - seconds)
    if not found.times:
        found = read_recording(folder)
    if found.times:
        found.forget(found.times[-1] - seconds)
    return found

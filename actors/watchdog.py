"""The driver's own eye on the run: says by itself what ``streamrl why`` would say, when a deadline passes or the run makes no progress.

Reads the run folder like everybody else. Nothing that it does can end the run; a look that fails is logged once.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Mapping
from typing import Any, Protocol

from actors.places import Places
from streamrl.diagnosis import read_view, stacks
from streamrl.diagnosis.alarm import Alarm, Lookout
from streamrl.diagnosis.printing import format_diagnosis
from streamrl.errors import BreakerOpen, RunFailed, StreamrlError, TakeTimeout, WaitTimeout
from streamrl.telemetry.run_folder import RunFolder

log = logging.getLogger(__name__)

FAR_S = 10.0  # for an actor of another node to gather stacks there
VICTIMS = (BreakerOpen, TakeTimeout, WaitTimeout)  # errors of whoever waited; the culprit is another


class Board(Protocol):
    """Where an alarm is told; ``note`` stands in the status until it is over."""

    note: str

    def say(self, message: str) -> None: ...


class Member(Protocol):
    """An actor that may be asked."""

    async def call(self, method: str, *args: Any, limit_s: float) -> Any: ...


class Watchdog:
    """One run's. ``look`` once a tick."""

    def __init__(self, folder: RunFolder, board: Board, members: Mapping[str, Member], places: Places) -> None:
        self._folder, self._board, self._members, self._places = folder, board, members, places
        self._lookout = Lookout()
        self._failed = False

    async def look(self) -> None:
        """Tell what is wrong, if it is time to."""
        try:
            alarm = await asyncio.to_thread(lambda: self._lookout.look(read_view(self._folder)))
            standing = self._lookout.standing
            self._board.note = standing.headline if standing is not None else ""
            if alarm is not None:
                await self._tell(alarm)
        except Exception:  # whatever is odd about a file: a run is not ended for it
            if not self._failed:
                log.exception("the watchdog could not look at the run; further failures are not logged")
            self._failed = True

    async def _tell(self, alarm: Alarm) -> None:
        text = format_diagnosis(alarm.diagnosis)
        self._board.say(f"{text}\n  more: streamrl why {shlex.quote(str(self._folder.root))} --stacks")
        if alarm.stalled:
            await self._keep_stacks()
            log.warning("the stacks of all actors are in %s", self._folder.logs / "<actor>.stacks")

    async def _keep_stacks(self) -> None:
        """A process is signalled from its own machine: here by the driver, on another node by an actor there that still answers."""
        near = [name for name in self._members if not self._places.is_away(name)]
        await asyncio.to_thread(stacks.ask, self._folder, near)
        nodes: dict[str, list[str]] = {}
        for name in self._members.keys() - set(near):
            nodes.setdefault(self._places.node_of(name), []).append(name)
        for names in nodes.values():
            await self._ask_there(names)

    async def _ask_there(self, names: list[str]) -> None:
        for name in names:
            try:
                return await self._members[name].call("dump_stacks", names, limit_s=FAR_S)
            except StreamrlError as error:
                log.warning("%s could not ask for the stacks of its node: %s", name, error)

    def explained(self, error: StreamrlError, cause: StreamrlError | None) -> StreamrlError:
        """``error`` with the culprit, when ``cause`` is that of somebody who only waited."""
        newest = self._lookout.newest
        if newest is None or not newest.culprit or newest.verdict == "fine" or not isinstance(cause, VICTIMS):
            return error
        return RunFailed(f"{error}; the cause, as it looked last: {newest.headline}; {newest.next_step}")

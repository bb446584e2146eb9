"""The coordinator, in the driver: starts the actors, watches every one, has dead ones replaced, ends the run in order.

Guarantees: the death of any actor is noticed at once (its ``run`` ends) and ends in a restart or in one clear error; no process and no port stays
behind, and no shared-memory file but the rows of a run that failed, which a resumed one adopts; a stop finishes the step, saves, and is over
within ``cluster.stop_timeout_s``. It touches no data and imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from actors import children
from actors.board import Board
from actors.host import settings_for
from actors.members import Member, create, failure_of, handles, has_died, join_learners, lost_node, names_of, of_role, together
from actors.places import Places
from actors.remote import answer, client
from actors.restarts import Restarts
from actors.trainer import Progress
from actors.watchdog import Watchdog
from streamrl.config import Config
from streamrl.errors import ActorDied, EngineError, RunFailed, StreamrlError, from_wire
from streamrl.protocol.interfaces import BatchSource
from streamrl.telemetry.run_folder import RunFolder

log = logging.getLogger(__name__)

TICK_S = 1.0  # how often the board (live line, waits.json, status.json) is refreshed
ROOT_CAUSE_S = 3.0  # after a failure, how long other deaths are awaited: the first complaint is often a victim's
BOOKS_S = 3.0  # for the replay buffer's last counts
DYING_S = 1.0  # after ray.kill, for a process to be gone


class Supervisor:
    """One run from the first actor to the last."""

    def __init__(self, config: Config, folder: RunFolder, board: Board, resume: Path | None, places: Places | None = None) -> None:
        self.config = config
        self.folder = folder
        self.board = board
        self.places = places or Places()
        self.members: dict[str, Member] = {}
        self._settings: Callable[[str, str], bytes] = partial(_settings, config=config, folder=folder, resume=resume, places=self.places)
        self._refused: Counter[str] = Counter()
        self.watchdog = Watchdog(folder, board, self.members, self.places)
        self.restarts = Restarts(config, folder, board, self.members, self._settings, self.places, resume)
        self._stopping = asyncio.Event()

    def request_stop(self) -> None:
        """End in order; a second request is the caller's business (it kills)."""
        self._stopping.set()

    async def run(self) -> None:
        """Start, watch until the trainer has ended, close. RunFailed (or the actor's own error) otherwise."""
        try:
            await self._unless_stopped(self._start())
            if not self._stopping.is_set():
                self.folder.begin()
                await self._watch()
        except BaseException:
            await self._close(in_order=False)
            raise
        await self._close(in_order=True)

    async def _unless_stopped(self, work) -> None:
        """A stop request during the start cancels it: nothing is worth saving yet."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            task.result()
        else:
            task.cancel()

    # ---- start

    async def _start(self) -> None:
        limit_s = self.config.cluster.start_timeout_s
        for name, role in names_of(self.config, self.places):
            self.members[name] = create(name, role, self.config, self._settings, self.places)
        light = [*self._role("store"), self.members["replay"], self.members["prompt"]]
        heavy = [*self._role("learner"), *self._role("rollout")]
        self.board.say(f"starting {len(self.members)} actors")
        await together([member.open(handles(self.members), limit_s) for member in [*light, *heavy]])
        await join_learners(self._role("learner"), limit_s)
        trainer = self.members["trainer"]
        await trainer.open(handles(self.members), limit_s)
        self.board.members(self.members.values())
        self.board.say("publishing the starting weights to every engine")
        await trainer.call("prepare", limit_s=limit_s)
        # Attached after: a replica that dies or refuses its first weights ends the start at once, with its own error.
        await together([trainer.call("attach", member.name, member.handle, limit_s=limit_s) for member in self._role("rollout")])
        for member in self.members.values():
            member.start_run()

    def _role(self, role: str) -> list[Member]:
        return of_role(self.members, role)

    # ---- watch

    async def _watch(self) -> None:
        """Until the trainer has ended. Waits on the runs themselves; the tick only refreshes what is shown."""
        stopping: asyncio.Task[None] | None = None
        while not self._has_ended():
            runs = {m.run for m in self.members.values() if m.run is not None and not m.run.done()}
            await asyncio.wait({*runs, *self.restarts.tasks.values()}, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
            await self._check_nodes()
            await self._handle_ends()
            await self._show()
            if stopping is not None and stopping.done():
                stopping.result()  # the limit has passed
            if self._stopping.is_set() and stopping is None and self.members["trainer"].run is not None:
                self.board.say("stopping: finishing the step, saving, closing")
                stopping = asyncio.create_task(self._stop_trainer(self.members["trainer"]))
        if stopping is not None:
            await stopping
        await self._show()

    def _has_ended(self) -> bool:
        """Whether the trainer has ended in order."""
        trainer = self.members["trainer"]
        return trainer.run is not None and trainer.run.done() and failure_of(trainer) is None

    async def _show(self) -> None:
        """Refresh the board; a replica that the publisher took out of rotation is replaced."""
        progress = await self.progress()
        for name, wire in progress.failed_replicas.items() if progress else ():
            self._replace_failed(self.members[name], from_wire(*wire))
        await self.board.refresh(self.members.values(), progress)
        await self.watchdog.look()

    def _replace_failed(self, member: Member, error: StreamrlError) -> None:
        """Once when it refused a version (its weights differ from the manifest, or it was late); its death counts as any other."""
        if member.run is None or failure_of(member) is not None:
            return  # being replaced already, or about to be: its run tells of the death too
        if not isinstance(error, ActorDied | EngineError):
            self._refused[member.name] += 1
            if self._refused[member.name] > 1:
                raise RunFailed(f"{member.name} refused a weight version for the second time, after a restart: {error}")
        self.restarts.begin(member, RunFailed(f"{member.name} was taken out: {error}"))

    async def _stop_trainer(self, trainer: Member) -> None:
        limit_s = self.config.cluster.stop_timeout_s
        await trainer.call("stop", limit_s=limit_s)
        done, _ = await asyncio.wait({trainer.run}, timeout=limit_s * 0.75)
        if not done:
            raise RunFailed(
                f"a stopped run must save within cluster.stop_timeout_s={limit_s:g} s, got a step that is still running; "
                "the last checkpoint is the newest state: raise the limit for slow steps"
            )

    async def _check_nodes(self) -> None:
        """No actor of a lost node can be replaced: its place is gone, and its rows with it."""
        lost = await asyncio.to_thread(lost_node, self.places)
        if lost is not None:
            raise RunFailed(
                f"every node of a run stays until its end, got node {lost} which Ray has lost; the run ends. Continue it from its last checkpoint, "
                f"on the nodes that there are then, with: streamrl launch --resume {self.folder.root}"
            )

    async def _handle_ends(self) -> None:
        """Look at every run that has ended: in order, in words, or by the death of its process. Deaths are cured, most words end the run."""
        failures = self._failures()
        if not all(self._is_curable(name, error) for name, error in failures.items()):
            await self._hear_everybody()
            failures = self._failures()
            learner_died = any(has_died(rank) for rank in self._role("learner")) and not self._stopping.is_set()
            if not all(self._is_curable(name, error) or (learner_died and name == "trainer") for name, error in failures.items()):
                raise self._root_cause()
        for name, error in sorted(failures.items(), key=lambda item: not item[0].startswith("learner")):  # their restart includes the trainer
            self.restarts.begin(self.members[name], error)
        for name, error in self.restarts.ended().items():
            self.restarts.begin(self.members[name], error)

    def _failures(self) -> dict[str, StreamrlError]:
        return {m.name: error for m in self.members.values() if (error := failure_of(m)) is not None}

    def _is_curable(self, name: str, error: StreamrlError) -> bool:
        """A replica may also say that its engine broke. A run that is being stopped is not worth new actors, but for those that it can do without."""
        member = self.members[name]
        if member.role == "rollout":
            return isinstance(error, ActorDied | EngineError)
        return has_died(member) and not self._stopping.is_set()

    async def _hear_everybody(self) -> None:
        """The first complaint is often a victim's."""
        await asyncio.wait({m.run for m in self.members.values() if m.run is not None}, timeout=ROOT_CAUSE_S)

    def _root_cause(self) -> StreamrlError:
        """A process that died explains the complaints of those who waited for it, which in turn say more than other errors."""
        failed = [m for m in self.members.values() if failure_of(m) is not None]
        first = min(failed, key=lambda m: (not has_died(m), not isinstance(failure_of(m), ActorDied)))
        name, error = first.name, failure_of(first)
        if isinstance(error, ActorDied):
            return RunFailed(f"{error}; the run ends. Continue it from its last checkpoint with: streamrl launch --resume {self.folder.root}")
        return self.watchdog.explained(RunFailed(f"{name} failed: {error}"), error)

    async def progress(self) -> Progress | None:
        """New records and totals from the trainer; None when it does not answer in time (a busy moment, or its death)."""
        trainer = self.members["trainer"]
        if trainer.run is None:
            return None  # it is being replaced
        try:
            reply = await answer(trainer.handle.progress.remote(self.board.num_records), "progress of trainer", 5.0)
        except StreamrlError:
            return None
        return msgspec.msgpack.decode(reply, type=Progress)

    # ---- close

    async def _close(self, *, in_order: bool) -> None:
        """Close in order within a short limit, then end whatever is left: the books are read when the rollout actors have told what they spent, and before
        the replay buffer goes. A run that failed is left as if its processes had been killed: with its journals open and its rows in shared memory, so that
        a resumed one loses nothing."""
        self.restarts.cancel()
        await asyncio.to_thread(self.board.end_recording)  # while there is something to record
        order = [m for role in ("trainer", "prompt", "rollout", "learner", "replay", "store") for m in self._role(role)]
        asked = [m for m in order if in_order or m.role == "rollout"]  # an engine also ends what it started
        await asyncio.gather(*(_quiet_stop(member) for member in asked if member.role not in ("replay", "store")))
        await self._read_books()
        for role in ("replay", "store"):
            await asyncio.gather(*(_quiet_stop(member) for member in asked if member.role == role))
        for member in order:
            if member.role != "store":
                member.kill()
        away = [store for store in self._role("store") if self.places.is_away(store.name)]
        await asyncio.gather(*(_quiet_end(store) for store in away))
        for member in self._role("store"):
            member.kill()
        for path in sorted(self.folder.children.glob("*.json")):
            await asyncio.to_thread(children.end_leftovers, path, grace_s=DYING_S)

    async def _read_books(self) -> None:
        replay = self.members.get("replay")
        if replay is None or replay.run is None or has_died(replay):
            return  # it never served, or can't be asked: the trainer's last account stands
        try:
            source: BatchSource = client(replay.handle, "replay", BatchSource, limit_s=BOOKS_S, folder=self.folder)
            self.board.settle(await source.stats())
        except StreamrlError as error:
            log.warning("the last counts of the replay buffer could not be read: %s", error)


def _settings(name: str, role: str, *, config: Config, folder: RunFolder, resume: Path | None, places: Places) -> bytes:
    return settings_for(name, role, config, folder, resume if role == "trainer" else None, places)


async def _quiet_end(store: Member, limit_s: float = 8.0) -> None:
    """Processes that actors of another node left are ended there."""
    try:
        await store.call("end_leftovers", limit_s=limit_s)
    except StreamrlError as error:
        log.warning("what is left of the run on the node of %s could not be ended: %s", store.name, error)


async def _quiet_stop(member: Member, limit_s: float = 8.0) -> None:
    """Ask an actor to close; one that cannot answer is killed a moment later anyway."""
    try:
        await member.call("stop", limit_s=limit_s)
    except StreamrlError as error:
        log.debug("%s did not close in order: %s", member.name, error)

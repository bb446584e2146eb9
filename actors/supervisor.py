"""The coordinator, in the driver: starts the actors, watches every one, restarts a dead rollout actor, ends the run in order.

Guarantees: the death of any actor is noticed at once (its ``run`` ends) and ends in a restart or in one clear error; no process, no
shared-memory file and no port stays behind; a stop finishes the step, saves, and is over within ``cluster.stop_timeout_s``.
It touches no data and imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import ray

from actors import children
from actors.board import Board
from actors.members import Member, create, names_of, settings_for
from actors.remote import answer, client
from actors.trainer import Progress
from streamrl.config import Config
from streamrl.dataplane import IndexCalls
from streamrl.errors import ActorDied, EngineError, RunFailed, StreamrlError, from_wire
from streamrl.protocol.interfaces import BatchSource
from streamrl.telemetry.run_folder import RunFolder

log = logging.getLogger(__name__)

TICK_S = 1.0  # how often the board (live line, waits.json, status.json) is refreshed
ROOT_CAUSE_S = 3.0  # after a failure, how long other deaths are awaited: the first complaint is often a victim's


class Supervisor:
    """One run from the first actor to the last."""

    def __init__(self, config: Config, folder: RunFolder, board: Board, resume: Path | None) -> None:
        self.config = config
        self.folder = folder
        self.board = board
        self.members: dict[str, Member] = {}
        self._settings: Callable[[str, str], bytes] = partial(_settings, config=config, folder=folder, resume=resume)
        self._restarts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._restarting: dict[str, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()

    def request_stop(self) -> None:
        """End in order; a second request is the caller's business (it kills)."""
        self._stopping.set()

    async def run(self) -> None:
        """Start, watch until the trainer has ended, close. RunFailed (or the actor's own error) otherwise."""
        try:
            await self._unless_stopped(self._start())
            if not self._stopping.is_set():
                await self._watch()
        finally:
            await self._close()

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
        for name, role in names_of(self.config):
            self.members[name] = create(name, role, self.config, self._settings)
        light = [self.members[name] for name in ("store", "replay", "prompt")]
        heavy = [m for m in self.members.values() if m.role in ("learner", "rollout")]
        self.board.say(f"starting {len(self.members)} actors")
        await _together([member.open(self._peers(), limit_s) for member in [*light, *heavy]])
        await self._join_learners(limit_s)
        trainer = self.members["trainer"]
        await trainer.open(self._peers(), limit_s)
        self.board.members(self.members.values())
        self.board.say("publishing the starting weights to every engine")
        await trainer.call("prepare", limit_s=limit_s)
        # Attached after: a replica that dies or refuses its first weights ends the start at once, with its own error.
        await _together([trainer.call("attach", member.name, member.handle, limit_s=limit_s) for member in self._role("rollout")])
        for member in self.members.values():
            member.start_run()

    async def _join_learners(self, limit_s: float) -> None:
        ranks = self._role("learner")
        address = await ranks[0].call("rendezvous", ray.util.get_node_ip_address(), limit_s=limit_s)
        await _together([rank.call("join", address, limit_s=limit_s) for rank in ranks])

    def _peers(self) -> dict[str, ray.actor.ActorHandle]:
        return {name: member.handle for name, member in self.members.items()}

    def _role(self, role: str) -> list[Member]:
        return [member for member in self.members.values() if member.role == role]

    # ---- watch

    async def _watch(self) -> None:
        """Until the trainer has ended. Waits on the runs themselves; the tick only refreshes what is shown."""
        trainer = self.members["trainer"]
        stopping: asyncio.Task[None] | None = None
        while not trainer.run.done():
            runs = {m.run for m in self.members.values() if m.run is not None and not m.run.done()}
            await asyncio.wait({*runs, *self._restarting.values()}, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
            await self._handle_ends()
            await self._show()
            if stopping is not None and stopping.done():
                stopping.result()  # the limit has passed
            if self._stopping.is_set() and stopping is None:
                self.board.say("stopping: finishing the step, saving, closing")
                stopping = asyncio.create_task(self._stop_trainer(trainer))
        if stopping is not None:
            await stopping
        await self._handle_ends()
        await self._show()

    async def _show(self) -> None:
        """Refresh the board; a replica that the publisher took out of rotation is replaced."""
        progress = await self.progress()
        for name, wire in progress.failed_replicas.items() if progress else ():
            self._replace_failed(self.members[name], from_wire(*wire))
        await self.board.refresh(self.members.values(), progress)

    def _replace_failed(self, member: Member, error: StreamrlError) -> None:
        """Once when it refused a version (its weights differ from the manifest, or it was late); its death counts as any other."""
        if member.run is None or _failure(member) is not None:
            return  # being replaced already, or about to be: its run tells of the death too
        if not isinstance(error, ActorDied | EngineError):
            self._refused[member.name] += 1
            if self._refused[member.name] > 1:
                raise RunFailed(f"{member.name} refused a weight version for the second time, after a restart: {error}")
        self._restart(member, RunFailed(f"{member.name} was taken out: {error}"))

    async def _stop_trainer(self, trainer: Member) -> None:
        limit_s = self.config.cluster.stop_timeout_s
        await trainer.call("stop", limit_s=limit_s)
        done, _ = await asyncio.wait({trainer.run}, timeout=limit_s * 0.75)
        if not done:
            raise RunFailed(
                f"a stopped run must save within cluster.stop_timeout_s={limit_s:g} s, got a step that is still running; "
                "the last checkpoint is the newest state: raise the limit for slow steps"
            )

    async def _handle_ends(self) -> None:
        """Look at every run that has ended: in order, in words, or by the death of its process."""
        failures = {m.name: error for m in self.members.values() if (error := _failure(m)) is not None}
        if not all(self.members[name].role == "rollout" and isinstance(error, ActorDied | EngineError) for name, error in failures.items()):
            raise await self._root_cause()
        for name, task in list(self._restarting.items()):
            if task.done():
                del self._restarting[name]
                failure = task.exception()
                if isinstance(failure, ActorDied | EngineError):
                    failures[name] = failure  # the replacement died before it served
                elif failure is not None:
                    raise failure
        for name, error in failures.items():
            self._restart(self.members[name], error)

    async def _root_cause(self) -> StreamrlError:
        """A process that died explains the complaints of those who waited for it, which in turn say more than other errors."""
        await asyncio.wait({m.run for m in self.members.values() if m.run is not None}, timeout=ROOT_CAUSE_S)
        failed = [m for m in self.members.values() if _failure(m) is not None]
        first = min(failed, key=lambda m: (not _has_died(m), not isinstance(_failure(m), ActorDied)))
        name, error = first.name, _failure(first)
        if isinstance(error, ActorDied):
            return RunFailed(f"{error}; the run ends. Continue it from its last checkpoint with: streamrl launch --resume {self.folder.root}")
        return RunFailed(f"{name} failed: {error}")

    def _restart(self, member: Member, error: StreamrlError) -> None:
        """Replace a dead rollout actor: its leases go back, its processes are ended, a new one joins when it holds the newest version."""
        self._restarts[member.name] += 1
        if self._restarts[member.name] > self.config.cluster.max_restarts:
            raise RunFailed(f"{member.name} may be restarted cluster.max_restarts={self.config.cluster.max_restarts} times, and died again: {error}")
        log.warning("%s; starting a replacement (%d of %d)", error, self._restarts[member.name], self.config.cluster.max_restarts)
        self.board.say(f"{member.name} died; its groups are generated again (restart {self._restarts[member.name]})")
        self.board.restarted(member.role)
        member.run = None
        self._restarting[member.name] = asyncio.create_task(self._replace(member), name=f"restart {member.name}")

    async def _replace(self, member: Member) -> None:
        limit_s = self.config.cluster.start_timeout_s
        trainer = self.members["trainer"]
        member.kill()
        await trainer.call("detach", member.name, limit_s=limit_s)
        await asyncio.to_thread(children.end_leftovers, self.folder.children / f"{member.name}.json")  # from here on nobody writes or leases by that name
        await client(self.members["store"].handle, "store", IndexCalls, limit_s=limit_s).writer_gone(member.name)
        await client(self.members["replay"].handle, "replay", BatchSource, limit_s=limit_s).release_worker(member.name)
        fresh = create(member.name, member.role, self.config, self._settings)
        self.members[member.name] = fresh
        await fresh.open(self._peers(), limit_s)
        await trainer.call("attach", fresh.name, fresh.handle, limit_s=limit_s)
        fresh.start_run()

    async def progress(self) -> Progress | None:
        """New records and totals from the trainer; None when it does not answer in time (a busy moment, or its death)."""
        try:
            reply = await answer(self.members["trainer"].handle.progress.remote(self.board.num_records), "progress of trainer", 5.0)
        except StreamrlError:
            return None
        return msgspec.msgpack.decode(reply, type=Progress)

    # ---- close

    async def _close(self) -> None:
        """Close in order within a short limit, then end whatever is left."""
        for task in self._restarting.values():
            task.cancel()
        order = [m for role in ("trainer", "prompt", "rollout", "learner", "replay", "store") for m in self._role(role)]
        await asyncio.gather(*(_quiet_stop(member) for member in order if member.role != "store"))
        await asyncio.gather(*(_quiet_stop(member) for member in order if member.role == "store"))
        for member in order:
            member.kill()
        for path in sorted(self.folder.children.glob("*.json")):
            await asyncio.to_thread(children.end_leftovers, path)


def _settings(name: str, role: str, *, config: Config, folder: RunFolder, resume: Path | None) -> bytes:
    return settings_for(name, role, config, folder, resume if role == "trainer" else None)


def _has_died(member: Member) -> bool:
    """Its process is gone; a run that only reports an error ends with a result."""
    return member.run is not None and member.run.done() and member.run.exception() is not None


def _failure(member: Member) -> StreamrlError | None:
    """How the run of an actor ended, if it ended badly."""
    if member.run is None or not member.run.done():
        return None
    if (error := member.run.exception()) is not None:
        if isinstance(error, ray.exceptions.RayActorError):
            return ActorDied(f"{member.name} (pid {member.hello.pid if member.hello else '?'}) has died")
        return RunFailed(f"{type(error).__name__}: {error}")
    wire = member.run.result()
    return None if wire is None else from_wire(*wire)


async def _together(calls) -> None:
    """All at once; the first error ends the wait."""
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(call)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _quiet_stop(member: Member, limit_s: float = 8.0) -> None:
    """Ask an actor to close; one that cannot answer is killed a moment later anyway."""
    try:
        await member.call("stop", limit_s=limit_s)
    except StreamrlError as error:
        log.debug("%s did not close in order: %s", member.name, error)

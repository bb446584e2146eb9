"""Replacing actors while the run goes on: what each kind's death means for the others, in the order in which they must hear of it.

    rollout    its leases and segments go back; the new one joins when it holds the newest version
    replay     the new one goes on where the journal ends; the others wait for it on their channels
    store      the new one finds all rows in the shared memory of the old one
    prompt     the new one begins after the last prompt that was admitted
    trainer    the new one settles the step that the learner was asked for, if it was done; replicas join it again
    learner    all ranks and the trainer are new and go back to the newest checkpoint; what was trained since then comes back

Guarantees: nobody writes, leases or answers by a dead actor's name once its successor does; each actor is replaced at most ``cluster.max_restarts``
times. Decides nothing about what counts as a death: ``supervisor.py`` does.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

from actors import children
from actors.members import Member, create, handles, is_serving, join_learners, of_role, together
from actors.places import Places
from actors.remote import client
from streamrl.config import Config
from streamrl.dataplane import IndexCalls
from streamrl.errors import ActorDied, CheckpointError, EngineError, RunFailed, StreamrlError
from streamrl.learner import checkpoint_folder
from streamrl.pipeline.standing import read_standing
from streamrl.protocol.interfaces import BatchSource
from streamrl.protocol.topic import Topic
from streamrl.telemetry.run_folder import RunFolder

log = logging.getLogger(__name__)

DEATH_S = 2.0  # within this time after a call to a dead process its end is known here
MEANS = {
    "rollout": "its groups are generated again",
    "replay": "its successor goes on from the journal",
    "store": "its successor finds its rows in shared memory",
    "prompt": "its successor goes on after the last admitted prompt",
    "trainer": "its successor goes on with the step under way",
}


class Board(Protocol):
    """Where a restart is named."""

    def say(self, message: str) -> None: ...
    def restarted(self, role: str) -> None: ...


class Restarts:
    """``tasks``: replacements under way, by the name of the actor; all learner ranks and the trainer are one, named learner."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        board: Board,
        members: dict[str, Member],
        settings: Callable[[str, str], bytes],
        places: Places | None = None,
        resume: Path | None = None,
    ) -> None:
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._config = config
        self._folder = folder
        self._board = board
        self._members = members
        self._settings = settings
        self._places = places or Places()
        self._resume = resume
        self._limit_s = config.cluster.start_timeout_s
        self._counts: Counter[str] = Counter()
        self._served = Topic()

    def begin(self, member: Member, error: StreamrlError) -> None:
        """Replace ``member``. RunFailed when it may not be restarted any more."""
        key = "learner" if member.role == "learner" else member.name
        if key in self.tasks or (member.role == "trainer" and "learner" in self.tasks):
            return
        self._count(member, error)
        if key == "learner" and (task := self.tasks.pop("trainer", None)) is not None:
            task.cancel()  # the learner's restart includes the trainer
        gone = [member] if key != "learner" else [*of_role(self._members, "learner"), self._members["trainer"]]
        for one in gone:
            one.run = one.hello = None  # its page is gone
        self.tasks[key] = asyncio.create_task(self._replace(member.role, gone), name=f"restart {key}")

    def ended(self) -> dict[str, StreamrlError]:
        """Successors that died before they served, by name. Raises what else went wrong."""
        died: dict[str, StreamrlError] = {}
        for key, task in list(self.tasks.items()):
            if task.done():
                del self.tasks[key]
                failure = task.exception()
                if isinstance(failure, ActorDied | EngineError):
                    died["learner-0" if key == "learner" else key] = failure
                elif failure is not None:
                    raise failure
        return died

    def cancel(self) -> None:
        for task in self.tasks.values():
            task.cancel()

    def _count(self, member: Member, error: StreamrlError) -> None:
        limit = self._config.cluster.max_restarts
        self._counts[member.name] += 1
        count = self._counts[member.name]
        if count > limit:
            raise RunFailed(
                f"{member.name} may be restarted cluster.max_restarts={limit} times, and died again: {error}; "
                f"go on with: streamrl launch --resume {self._folder.root}"
            )
        log.warning("%s; starting a replacement (%d of %d)", error, count, limit)
        means = falls_back(self._folder, self._resume) if member.role == "learner" else MEANS[member.role]
        self._board.say(f"{member.name} died; {means} (restart {count})")
        self._board.restarted(member.role)

    # ---- one sequence a kind

    async def _replace(self, role: str, gone: list[Member]) -> None:
        for member in gone:
            member.kill()
        for member in gone:
            await asyncio.to_thread(children.end_leftovers, _record(self._folder, member))  # from here on nobody acts by that name
        if role == "rollout":
            await self._rollout(gone[0])
        elif role == "trainer":
            await self._trainer(gone[0], "recall")
        elif role == "learner":
            await self._learners(gone[:-1])
            await self._trainer(gone[-1], "fall_back")
        else:
            self._serve(await self._successor(gone[0]))

    async def _rollout(self, member: Member) -> None:
        await self._ask_trainer("detach", member.name)
        await self._writer_gone(member)
        await self._replay().release_worker(member.name)
        fresh = await self._successor(member)
        await self._ask_trainer("attach", fresh.name, fresh.handle)
        self._serve(fresh)

    async def _trainer(self, member: Member, how: str) -> None:
        fresh = await self._successor(member)
        await fresh.call(how, limit_s=self._limit_s)
        replicas = [replica for replica in of_role(self._members, "rollout") if is_serving(replica)]
        await together([_unless_dead(fresh.call("attach", replica.name, replica.handle, limit_s=self._limit_s)) for replica in replicas])
        self._serve(fresh)

    async def _learners(self, ranks: list[Member]) -> None:
        for rank in ranks:
            await self._writer_gone(rank)
        for rank in ranks:
            self._members[rank.name] = create(rank.name, rank.role, self._config, self._settings, self._places)
        fresh = of_role(self._members, "learner")
        await together([rank.open(handles(self._members), self._limit_s) for rank in fresh])
        await join_learners(fresh, self._limit_s)
        for rank in fresh:
            self._serve(rank)

    async def _successor(self, member: Member) -> Member:
        fresh = create(member.name, member.role, self._config, self._settings, self._places)
        self._members[member.name] = fresh
        await fresh.open(handles(self._members), self._limit_s)
        return fresh

    def _serve(self, member: Member) -> None:
        member.start_run()
        self._served.wake()

    # ---- the others, which may be restarted just now

    async def _ask_trainer(self, method: str, *arguments: Any) -> None:
        """Asked again of its successor when it dies meanwhile."""
        while True:
            trainer = await self._trainer_in_service()
            try:
                return await trainer.call(method, *arguments, limit_s=self._limit_s)
            except ActorDied:
                if trainer.run is not None:
                    await asyncio.wait({trainer.run}, timeout=DEATH_S)
                if is_serving(trainer):
                    raise  # it speaks of the replica

    async def _trainer_in_service(self) -> Member:
        deadline = asyncio.get_running_loop().time() + self._limit_s
        while not is_serving(self._members["trainer"]):
            if not await self._served.wait_until(deadline):
                raise RunFailed(f"a replica joins a trainer that serves within cluster.start_timeout_s={self._limit_s:g} s, got none; see the trainer's log")
        return self._members["trainer"]

    def _peer(self, name: str, interface: type) -> Any:
        patience_s = self._config.cluster.restart_patience_s
        return client(self._members[name].handle, name, interface, limit_s=self._limit_s, folder=self._folder, patience_s=patience_s)

    async def _writer_gone(self, member: Member) -> None:
        """Only the store of its own node has lent it segments."""
        store = self._places.store_near(member.name)
        if store is not None:
            index: IndexCalls = self._peer(store, IndexCalls)
            await index.writer_gone(member.name)

    def _replay(self) -> BatchSource:
        return self._peer("replay", BatchSource)


def falls_back(folder: RunFolder, resume: Path | None) -> str:
    """Where training goes on without the learner's weights. By the names of the checkpoints: whoever loads one checks it. ``resume``: what the run began
    with, if not with the starting weights."""
    saved = folder.newest_checkpoint()
    if saved is None and resume is not None:
        saved = checkpoint_folder.step_of(resume)
    try:
        standing = read_standing(folder.standing)
        lost = max(0, standing.state.step - (standing.open is not None) - (saved or 0))  # the step under way is none of them
    except CheckpointError:
        lost = 0  # nothing was published yet
    again = f"; {lost} step{'s' if lost > 1 else ''} since {'are' if lost > 1 else 'is'} done again" if lost else ""
    if saved is None:
        return f"there is no checkpoint: training begins again with the starting weights{again}"
    return f"training goes on from the checkpoint of step {saved}{again}"


def _record(folder: RunFolder, member: Member) -> Path:
    return folder.children / f"{member.name}.json"


async def _unless_dead(call: Coroutine[Any, Any, Any]) -> None:
    """A replica that is dead has a restart of its own, which joins it again."""
    try:
        await call
    except (ActorDied, EngineError) as error:
        log.warning("a replica could not join the new trainer: %s", error)

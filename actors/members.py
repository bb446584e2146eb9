"""The actors of a run: which there are, how each is placed, and a handle with its name for every one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import msgspec
import ray
import ray.exceptions
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.host import Hello, Host, WireError
from actors.learner import LearnerActor
from actors.places import Places
from actors.prompt import PromptActor
from actors.remote import answer, as_future
from actors.replay import ReplayActor
from actors.rollout import RolloutActor
from actors.store import StoreActor
from actors.trainer import TrainerActor
from streamrl.config import Config
from streamrl.errors import ActorDied, RunFailed, StreamrlError, from_wire
from streamrl.protocol.health import Health

log = logging.getLogger(__name__)

KINDS: dict[str, type[Host]] = {
    "store": StoreActor,
    "replay": ReplayActor,
    "prompt": PromptActor,
    "learner": LearnerActor,
    "rollout": RolloutActor,
    "trainer": TrainerActor,
}
HEALTH_S = 2.0  # a health question that is not answered by then shows as "no answer"


class Member:
    """One actor: its name, its handle, and the future of its run."""

    def __init__(self, name: str, role: str, handle: ActorHandle) -> None:
        self.name = name
        self.role = role
        self.handle = handle
        self.hello: Hello | None = None
        self.run: asyncio.Future[WireError | None] | None = None

    async def call(self, method: str, *args: Any, limit_s: float) -> Any:
        """Call a method of the actor itself; an error it reports in words is raised as its class."""
        result = await answer(getattr(self.handle, method).remote(*args), f"{method} of {self.name}", limit_s)
        if isinstance(result, tuple):
            raise from_wire(*result)
        return result

    async def open(self, peers: dict[str, ActorHandle], limit_s: float) -> None:
        """Introduce the actor and start its parts."""
        self.hello = msgspec.msgpack.decode(await self.call("hello", limit_s=limit_s), type=Hello)
        await self.call("start", peers, limit_s=limit_s)
        log.info("%s is open (pid %d)", self.name, self.hello.pid)

    def start_run(self) -> None:
        self.run = as_future(self.handle.run.remote())
        self.run.add_done_callback(lambda run: run.cancelled() or run.exception())  # looked at: who ends the run kills actors on purpose

    async def health(self) -> Health | None:
        """None when the actor does not answer in time."""
        try:
            return msgspec.msgpack.decode(await answer(self.handle.health.remote(), f"health of {self.name}", HEALTH_S), type=Health)
        except Exception:  # whatever is wrong with it, its run future tells; here it only shows as silent
            return None

    def kill(self) -> None:
        ray.kill(self.handle, no_restart=True)


def create(name: str, role: str, config: Config, settings: Callable[..., bytes], places: Places) -> Member:
    """Ask Ray for an actor, on the node that was planned for it. Light kinds ask for no CPU, so that everything fits a machine of two cores."""
    gpus = {"rollout": config.rollout.num_gpus_per_actor, "learner": config.learner.num_gpus_per_rank}.get(role, 0.0)
    resource = {"rollout": config.cluster.rollout_resource, "learner": config.cluster.learner_resource}.get(role)
    place = NodeAffinitySchedulingStrategy(places.node_of(name), soft=False)  # rows and weights lie in the memory of that node
    options = {"name": name, "num_cpus": 0, "num_gpus": gpus, "max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": place}
    if resource is not None:
        options["resources"] = {resource: 1}
    remote = ray.remote(KINDS[role]).options(**options)
    return Member(name, role, remote.remote(settings(name, role)))


def handles(members: dict[str, Member]) -> dict[str, ActorHandle]:
    """What an actor is introduced to."""
    return {name: member.handle for name, member in members.items()}


def of_role(members: dict[str, Member], role: str) -> list[Member]:
    return [member for member in members.values() if member.role == role]


async def join_learners(ranks: list[Member], limit_s: float) -> None:
    """All ranks meet at an address of rank 0, load the model and shard it."""
    assert ranks[0].hello is not None, "ranks are opened before they meet"
    address = await ranks[0].call("rendezvous", ranks[0].hello.host, limit_s=limit_s)
    await together([rank.call("join", address, limit_s=limit_s) for rank in ranks])


async def together(calls: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """All at once; the first error ends the wait."""
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(call)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def has_died(member: Member) -> bool:
    """Its process is gone; a run that only reports an error ends with a result."""
    return member.run is not None and member.run.done() and member.run.exception() is not None


def failure_of(member: Member) -> StreamrlError | None:
    """How the run of an actor ended, if it ended badly."""
    if member.run is None or not member.run.done():
        return None
    if (error := member.run.exception()) is not None:
        if isinstance(error, ray.exceptions.RayActorError):
            return ActorDied(f"{member.name} (pid {member.hello.pid if member.hello else '?'}) has died")
        return RunFailed(f"{type(error).__name__}: {error}")
    wire = member.run.result()
    return None if wire is None else from_wire(*wire)


def lost_node(places: Places) -> str | None:
    """The address of a node of the run that Ray has given up; None as long as all live."""
    if len(places.used()) == 1:
        return None  # the driver is on it
    gone = places.used() - {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return next((places.hosts.get(node, node) for node in sorted(gone)), None)


def is_serving(member: Member) -> bool:
    """Its loop runs, as far as is known."""
    return member.run is not None and not member.run.done()


def names_of(config: Config, places: Places) -> list[tuple[str, str]]:
    """(name, role) of every actor of a run, in the order they are opened."""
    fixed = [*((name, "store") for name in places.stores.values()), ("replay", "replay"), ("prompt", "prompt")]
    learners = [(f"learner-{i}", "learner") for i in range(config.learner.ranks)]
    rollouts = [(f"rollout-{i}", "rollout") for i in range(config.rollout.num_actors)]
    return [*fixed, *learners, *rollouts, ("trainer", "trainer")]


__all__ = [
    "Member",
    "create",
    "failure_of",
    "handles",
    "has_died",
    "is_serving",
    "join_learners",
    "lost_node",
    "names_of",
    "of_role",
    "together",
]

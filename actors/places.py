"""Which node every actor of a run is on, and which node has which store. Planned once, by the driver, from what Ray's nodes offer.

Rollout actors and learner ranks go to the driver's node, or to nodes that offer the resource of their kind, one unit each: rollout actors are spread,
ranks are packed, since they talk most. Everything else is light and stays with the driver. A node with rollout actors has a store; the first one is
called ``store``. Needs no Ray, and reserves nothing: Ray is asked for the same units when an actor is made.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from streamrl.config import Config
from streamrl.errors import ClusterTooSmall

SHORT = 8  # characters of a node's id that tell it from others in a path


class NodeOffer(msgspec.Struct, frozen=True):
    """A living node, and what it has in all."""

    node: str
    host: str
    gpus: float = 0.0
    units: dict[str, float] = {}


class Places(msgspec.Struct, frozen=True):
    """``nodes``: of each actor; those not named are on the driver's. ``stores``: the store of a node."""

    driver: str = ""
    nodes: dict[str, str] = {}
    stores: dict[str, str] = msgspec.field(default_factory=lambda: {"": "store"})
    hosts: dict[str, str] = {}  # of each node that is used, for messages

    def node_of(self, actor: str) -> str:
        return self.nodes.get(actor, self.driver)

    def is_away(self, actor: str) -> bool:
        """Whether it is on another node than the driver."""
        return self.node_of(actor) != self.driver

    def store_near(self, actor: str) -> str | None:
        """Name of the store of the actor's node, if that has one."""
        return self.stores.get(self.node_of(actor))

    def ledger(self, store: str, ledger: Path) -> Path:
        """Folder of a store's journal."""
        return ledger if store == "store" else ledger / store

    def weights_mark(self, actor: str) -> str:
        """Tells the folders for weights of two nodes apart, also where they share their memory."""
        return f"-{self.node_of(actor)[:SHORT]}" if self.is_away(actor) else ""

    def used(self) -> set[str]:
        """All nodes of the run."""
        return {self.driver, *self.nodes.values()}


def plan(config: Config, driver: str, offers: list[NodeOffer]) -> Places:
    """ClusterTooSmall, with what exists, when an actor finds no place."""
    order = sorted(offers, key=lambda offer: (offer.node != driver, offer.host, offer.node))
    table = _Table(driver, order)
    _check_gpus(config, table)
    nodes = {}
    for rank in range(config.learner.ranks):
        nodes[f"learner-{rank}"] = table.take(f"learner-{rank}", config.cluster.learner_resource, config.learner.num_gpus_per_rank, spread=False)
    for number in range(config.rollout.num_actors):
        nodes[f"rollout-{number}"] = table.take(f"rollout-{number}", config.cluster.rollout_resource, config.rollout.num_gpus_per_actor, spread=True)
    with_rows = [offer.node for offer in order if offer.node in {node for name, node in nodes.items() if name.startswith("rollout-")}]
    stores = {node: f"store-{number}" if number else "store" for number, node in enumerate(with_rows)}
    return Places(driver, nodes | {name: node for node, name in stores.items()}, stores, {offer.node: offer.host for offer in order})


class _Table:
    """What is left while actors are placed."""

    def __init__(self, driver: str, offers: list[NodeOffer]) -> None:
        self.driver, self.offers = driver, offers
        self.gpus = {offer.node: offer.gpus for offer in offers}
        self.units = {offer.node: dict(offer.units) for offer in offers}
        self.taken: Counter[tuple[str, str]] = Counter()

    def take(self, actor: str, resource: str | None, gpus: float, *, spread: bool) -> str:
        role = actor.split("-")[0]
        fitting = [offer.node for offer in self.offers if self._fits(offer.node, resource, gpus)]
        if not fitting:
            raise ClusterTooSmall(
                f"{actor} needs {_need(resource, gpus)}, got {self._left(resource)}; start Ray on a node with "
                f"--resources '{{\"{resource}\": 8}}' (one unit an actor), or change cluster.{role}_resource (null: the driver's node)"
            )
        node = min(fitting, key=lambda node: self.taken[role, node]) if spread else fitting[0]
        self.taken[role, node] += 1
        self.gpus[node] -= gpus
        if resource is not None:
            self.units[node][resource] -= 1
        return node

    def _fits(self, node: str, resource: str | None, gpus: float) -> bool:
        is_offered = node == self.driver if resource is None else self.units[node].get(resource, 0.0) >= 1
        return is_offered and self.gpus[node] >= gpus

    def _left(self, resource: str | None) -> str:
        left = [f"{offer.host} with {self.units[offer.node].get(resource or '', 0):g} units and {self.gpus[offer.node]:g} GPU free" for offer in self.offers]
        return f"{len(left)} nodes: {'; '.join(left)}"


def _need(resource: str | None, gpus: float) -> str:
    asked = [f"a unit of the resource {resource!r}"] if resource else []
    return " and ".join([*asked, *([f"{gpus:g} GPU"] if gpus else [])]) + " on one node"


def _check_gpus(config: Config, table: _Table) -> None:
    """What all actors on the driver's node ask for together."""
    rollout, learner = config.rollout, config.learner
    here = 0.0 if config.cluster.rollout_resource else rollout.num_actors * rollout.num_gpus_per_actor
    here += 0.0 if config.cluster.learner_resource else learner.ranks * learner.num_gpus_per_rank
    if here > table.gpus.get(table.driver, 0.0):
        raise ClusterTooSmall(
            f"the run needs {here:g} GPU on this node (rollout {rollout.num_actors} x {rollout.num_gpus_per_actor:g}, learner {learner.ranks} x "
            f"{learner.num_gpus_per_rank:g}), got {table.gpus.get(table.driver, 0.0):g}; lower rollout.num_gpus_per_actor or learner.num_gpus_per_rank, launch "
            "from a node that has them, or name other nodes with cluster.rollout_resource and cluster.learner_resource"
        )

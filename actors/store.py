"""Store actor, one per node with rollout actors: lends shared-memory segments, knows where every column of every row lies, and serves other nodes.

On another node than the driver it also looks after what the driver cannot reach: leftovers of dead runs, processes, copies of weights.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from actors import children
from actors.host import Host
from actors.remote import FarPeer, blocking_client, client
from streamrl.dataplane import IndexCalls, NodeStore, Store, StoreFace, StoreIndex, journalled_folder, sweep
from streamrl.dataplane.remote import Buffers, Wire
from streamrl.dataplane.sweep import open_folder
from streamrl.pipeline import build
from streamrl.pipeline.health import Facts
from streamrl.pipeline.metering import StoreMeter, export_every
from streamrl.protocol.clock import SystemClock
from streamrl.protocol.weights import WeightManifest
from streamrl.telemetry.run_folder import RunFolder
from streamrl.weights.copies import SnapshotCopies

FETCH_S = 60.0  # one frame of a snapshot


class NodeCalls(IndexCalls, Protocol):
    """What a store actor answers."""

    async def copy_weights(self, manifest: WeightManifest) -> WeightManifest:
        """The manifest of this node's copy of a snapshot, made now if there is none."""
        ...


class NodeTarget:
    """Answers ``NodeCalls``."""

    def __init__(self, index: StoreIndex, copies: SnapshotCopies) -> None:
        self._index = index
        self.copy_weights = copies.copy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)


class StoreActor(Host):
    """Serves ``NodeCalls``; its own loop only waits for the end."""

    async def open(self, peers: dict[str, Any]) -> None:
        self._closed = asyncio.Event()
        self._weights: Path | None = None
        owner, life = self.settings.driver_pid, ""
        if self.is_away:
            owner, life = os.getpid(), self.settings.life
            sweep(Path(self.config.dataplane.shm_dir), keep=adoptable(self.folder))
        self.index = build.build_index(self.config, self.folder.run_id, owner, self.places.ledger(self.name, self.folder.ledger), life)
        await self.index.writer_gone(self.name)  # what its predecessor wrote for other nodes
        store = Store(self.index, writer=self.name, folder=self.index.path, config=self.config.dataplane, loop=asyncio.get_running_loop(), metrics=self.metrics)
        self.face = StoreFace(store, self.index)
        await self.serve(NodeCalls, NodeTarget(self.index, self._copies(peers["learner-0"])))

    def _copies(self, learner: Any) -> SnapshotCopies:
        """On another node than the driver in a folder of this actor's; the driver's node has one."""
        folder = build.weights_dir(self.config, self.folder.run_id, self.places.weights_mark(self.name))
        if self.is_away and self.places.node_of("learner-0") != self.places.node_of(self.name):
            self._weights = open_folder(folder, os.getpid(), self.settings.life)
        return SnapshotCopies(folder, LearnerFiles(FarPeer(learner, "learner-0", FETCH_S, self.config.cluster.restart_patience_s)))

    async def rows(self, header: bytes, buffers: Buffers) -> tuple[bytes, Buffers]:
        """A request of another node for rows of this one: header and raw buffers, either way."""
        return await self.face.answer(header, buffers)

    async def end_leftovers(self) -> None:
        """End what actors of this node left; they have been killed."""
        for path in sorted(self.folder.children.glob("*.json")):
            if path.stem != self.name and self.places.node_of(path.stem) == self.places.node_of(self.name):
                await asyncio.to_thread(children.end_leftovers, path)

    async def work(self) -> None:
        meter = StoreMeter(self.metrics)

        async def export() -> None:
            meter.export(await self.index.use())

        exporting = asyncio.create_task(export_every(export, SystemClock()))
        await self._closed.wait()
        exporting.cancel()

    async def facts(self) -> Facts:
        return Facts(store=await self.index.use())

    async def close(self) -> None:
        self.index.close()
        if self._weights is not None and self.is_away:
            shutil.rmtree(self._weights, ignore_errors=True)
        self._closed.set()


class LearnerFiles:
    """Implements ``SnapshotSource``: files of the learner's node, read by rank 0."""

    def __init__(self, learner: FarPeer) -> None:
        self._learner = learner

    async def fetch(self, version: int, offset: int, num_bytes: int) -> memoryview:
        frame: np.ndarray = await self._learner.call("snapshot_bytes", version, offset, num_bytes, what=f"bytes of weight version {version}")
        return frame.data


def adoptable(folder: RunFolder) -> list[Path]:
    """Where the rows of a run lie that did not end in order, on any node: two nodes may be one machine."""
    named = (journalled_folder(ledger) for ledger in [folder.ledger, *sorted(folder.ledger.glob("store-*/"))])
    return [path for path in named if path is not None]


def store_client(actor: Host, peers: dict[str, Any]) -> Store:
    """The run's store as an actor uses it: index calls travel, bytes of its own node lie in shared memory. Called inside a running event loop."""
    home, names = actor.places.store_near(actor.name), list(actor.places.stores.values())
    limit_s, patience_s = actor.config.dataplane.put_timeout_s + 30, actor.config.cluster.restart_patience_s
    indexes = {name: client(peers[name], name, IndexCalls, limit_s=limit_s, folder=actor.folder, patience_s=patience_s) for name in names}
    options: dict[str, Any] = {"writer": actor.name, "config": actor.config.dataplane, "loop": asyncio.get_running_loop(), "metrics": actor.metrics}
    if home is not None and (len(names) == 1 or actor.settings.role == "rollout"):  # a rollout actor writes to its own node only
        direct = blocking_client(home, IndexCalls, limit_s=limit_s, folder=actor.folder, patience_s=patience_s)
        return Store(indexes[home], folder=None, direct=direct, **options)
    wires = {name: _wire(FarPeer(peers[name], name, limit_s, patience_s)) for name in names if name != home}
    return NodeStore(indexes, wires, home=home, **options)


def _wire(peer: FarPeer) -> Wire:
    return partial(peer.call, "rows", what="rows")

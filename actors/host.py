"""What every actor is besides its own work: settings, typed calls, a metrics page, open waits, its processes on record.

Guarantees: the code that runs is the driver's (same source files, by hash); an error leaves ``run`` as plain words
(class, message), never as a pickle; ``hello`` and ``health`` answer while the actor works.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import ray

import actors
import streamrl
from actors import children
from actors.places import Places
from actors.remote import socket_path
from streamrl.config import Config
from streamrl.dataplane.sweep import process_start
from streamrl.diagnosis import stacks
from streamrl.errors import RunFailed, to_wire
from streamrl.pipeline.health import Facts, health_of
from streamrl.protocol.channel import ChannelServer
from streamrl.protocol.request import enter_request
from streamrl.protocol.rpc import Service
from streamrl.protocol.waits import WaitTable
from streamrl.telemetry import logs
from streamrl.telemetry.metrics import Metrics
from streamrl.telemetry.run_folder import RunFolder

log = logging.getLogger(__name__)

WireError = tuple[str, str, str]
LOOPBACK, ANY_ADDRESS = ("127.0.0.1", "localhost", "::1"), ("0.0.0.0", "::")


class Settings(msgspec.Struct, frozen=True):
    """What an actor is told at birth. ``code`` is the hash of the driver's source files, to be compared."""

    name: str
    role: str
    run_dir: str
    config: Config
    code: str
    driver_pid: int
    life: str  # of the driver's process, unlike any other
    places: Places = Places()
    resume: str | None = None


class Hello(msgspec.Struct, frozen=True):
    """Who and where an actor is."""

    name: str
    role: str
    pid: int
    metrics_port: int | None
    host: str  # address of its node
    page_host: str  # where its page is found


def settings_for(name: str, role: str, config: Config, folder: RunFolder, resume: Path | None = None, places: Places | None = None) -> bytes:
    """Settings as the driver sends them."""
    settings = Settings(
        name,
        role,
        str(folder.root),
        config,
        code_digest(),
        os.getpid(),
        f"{os.getpid()}-{process_start(os.getpid())}",
        places or Places(),
        str(resume) if resume else None,
    )
    return msgspec.msgpack.encode(settings)


class Host:
    """Base of all actor classes. A kind overrides ``open`` (build and start), ``work`` (its loop) and ``close``."""

    def __init__(self, settings: bytes) -> None:
        self.settings = msgspec.msgpack.decode(settings, type=Settings)
        self.config = self.settings.config
        self.name = self.settings.name
        self.folder = RunFolder(Path(self.settings.run_dir))
        self.places = self.settings.places
        self.is_away = self.places.is_away(self.name)
        _check_code(self.settings)
        if self.is_away:
            _check_folder(self.folder, self.name)
            children.end_leftovers(self._children_file)  # of a predecessor: the driver cannot reach them
        logs.setup(self.name, file=self.folder.log_file(self.name), level=self.config.telemetry.log_level)
        self.metrics = Metrics(self.settings.role, self.name)
        bound = self.config.telemetry.host
        if self.is_away and bound not in (*LOOPBACK, *ANY_ADDRESS):
            bound = _address()  # an address of the driver's node is none of this one's
        self.metrics_port = self.metrics.serve(bound)
        self._page_host = _address() if bound in ANY_ADDRESS else bound
        self.waits = WaitTable(self.name)
        self._service: Service | None = None
        self._served = asyncio.Event()
        self._is_open = False
        self.channel: ChannelServer | None = None
        stacks.register(self.folder, self.name)
        self.record_children([])

    async def serve(self, interface: type, target: Any) -> None:
        """Answer the calls of ``interface`` from ``target``, until this process ends: those of this node on a socket, others through ``call``."""
        self._service = Service(interface, target)
        self._served.set()
        channel = ChannelServer(socket_path(self.folder, self.name), self._service.handle, self._service.handle_at_once)
        try:
            await channel.start()
            self.channel = channel
        except OSError as error:
            log.warning("all calls of %s go through Ray, which is slower: its socket cannot be made in the run folder (%s)", self.name, error)

    def record_children(self, pids: list[int]) -> None:
        """Write down this process and what it started, for the supervisor to end if they outlive it."""
        children.record(self._children_file, pids)

    @property
    def _children_file(self) -> Path:
        return self.folder.children / f"{self.name}.json"

    async def call(self, method: str, payload: bytes, request: tuple[str, int] | None = None) -> bytes:
        """A typed call from another node, or before there is a socket. ``request`` tells a repeat, as on a channel. A successor is known by its name
        before it is open, so calls wait for that."""
        limit_s = self.config.cluster.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._served.wait()
        except TimeoutError:
            raise RunFailed(f"{self.name} is opened within cluster.start_timeout_s={limit_s:g} s, got {method} before that; see its log") from None
        if request is not None:
            enter_request(*request)
        assert self._service is not None
        return await self._service.handle(method, payload)

    async def hello(self) -> bytes:
        return msgspec.msgpack.encode(Hello(self.name, self.settings.role, os.getpid(), self.metrics_port, _address(), self._page_host))

    async def health(self) -> bytes:
        return msgspec.msgpack.encode(health_of(self.waits, await self.facts(), self._is_open))

    async def facts(self) -> Facts:
        """What only this kind knows of how it is."""
        return Facts()

    async def dump_stacks(self, actors: list[str]) -> None:
        """Have processes of this node write where their threads stand."""
        await asyncio.to_thread(stacks.ask, self.folder, actors)

    async def start(self, peers: dict[str, Any]) -> WireError | None:
        """Open the actor with handles of the actors it talks to."""
        with self.metrics.state("start"):
            error = await self._guarded(self.open(peers))
        self._is_open = error is None
        return error

    async def run(self) -> WireError | None:
        """The actor's loop; its end (None: in order) is what the supervisor watches."""
        return await self._guarded(self.work())

    async def stop(self) -> WireError | None:
        """Close in order."""
        return await self._guarded(self.close())

    async def open(self, peers: dict[str, Any]) -> None:
        raise NotImplementedError

    async def work(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        """Nothing to close unless a kind says so."""

    async def _guarded(self, work: Any) -> WireError | None:
        try:
            await work
            return None
        except Exception as error:  # the edge of the process: log with traceback, hand on in plain words
            log.exception("%s failed", self.name)
            return to_wire(error)


def code_digest() -> str:
    """Hash over the source files of both packages, by name and content."""
    digest = hashlib.blake2b(digest_size=16)
    for package in (actors, streamrl):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _address() -> str:
    return ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"


def _check_folder(folder: RunFolder, name: str) -> None:
    """On another node than the driver: journals, logs and checkpoints go into one folder."""
    if not folder.config.is_file():
        raise RunFailed(
            f"the run folder is on a file system that every node of the run sees, got {folder.root} which does not hold this run on {_address()}, where {name} "
            "starts; name a folder on shared storage with run.dir"
        )


def _check_code(settings: Settings) -> None:
    """``actors`` is a generic name: another installed package of that name, or another version, must not run here unseen."""
    mine = code_digest()
    if mine != settings.code:
        raise RunFailed(
            f"every process runs the driver's code, got another one in {settings.name}: streamrl {streamrl.__version__} at {Path(streamrl.__path__[0])} "
            f"and actors at {Path(actors.__path__[0])}; install the same version on every node, and restart runs after an edit"
        )

"""What every actor is besides its own work: settings, typed calls, a metrics page, open waits, its processes on record.

Guarantees: the code that runs is the driver's (same source files, by hash); an error leaves ``run`` as plain words
(class, message), never as a pickle; ``hello`` and ``health`` answer while the actor works.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

import actors
import streamrl
from actors import children
from actors.remote import socket_path
from streamrl.config import Config
from streamrl.errors import RunFailed, to_wire
from streamrl.pipeline.waits import Wait, WaitTable
from streamrl.protocol.channel import ChannelServer
from streamrl.protocol.rpc import Service
from streamrl.telemetry import logs
from streamrl.telemetry.metrics import Metrics
from streamrl.telemetry.run_folder import RunFolder

log = logging.getLogger(__name__)

WireError = tuple[str, str, str]


class Settings(msgspec.Struct, frozen=True):
    """What an actor is told at birth. ``code`` is the hash of the driver's source files, to be compared."""

    name: str
    role: str
    run_dir: str
    config: Config
    code: str
    driver_pid: int
    resume: str | None = None


class Hello(msgspec.Struct, frozen=True):
    """Who and where an actor is."""

    name: str
    role: str
    pid: int
    metrics_port: int | None


class Health(msgspec.Struct, frozen=True):
    """What an actor waits for right now, and whether its process has loaded torch."""

    name: str
    pid: int
    waits: list[Wait]
    imports_torch: bool


def settings_for(name: str, role: str, config: Config, folder: RunFolder, resume: Path | None = None) -> bytes:
    """Settings as the driver sends them."""
    settings = Settings(
        name,
        role,
        str(folder.root),
        config,
        code_digest(),
        os.getpid(),
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
        _check_code(self.settings)
        logs.setup(self.name, file=self.folder.log_file(self.name), level=self.config.telemetry.log_level)
        self.metrics = Metrics(self.settings.role, self.name)
        self.metrics_port = self.metrics.serve(self.config.telemetry.host)
        self.waits = WaitTable(self.name)
        self._service: Service | None = None
        self.channel: ChannelServer | None = None
        self.record_children([])

    async def serve(self, interface: type, target: Any) -> None:
        """Answer the calls of ``interface`` from ``target``, until this process ends: those of this node on a socket, others through ``call``."""
        self._service = Service(interface, target)
        channel = ChannelServer(socket_path(self.folder, self.name), self._service.handle)
        try:
            await channel.start()
            self.channel = channel
        except OSError as error:
            log.warning("all calls of %s go through Ray, which is slower: its socket cannot be made in the run folder (%s)", self.name, error)

    def record_children(self, pids: list[int]) -> None:
        """Write down this process and what it started, for the supervisor to end if they outlive it."""
        children.record(self.folder.children / f"{self.name}.json", pids)

    async def call(self, method: str, payload: bytes) -> bytes:
        """A typed call from another node, or before there is a socket."""
        if self._service is None:
            raise RunFailed(f"{self.name} answers calls after it was opened, got {method}; the launcher opens every actor first")
        return await self._service.handle(method, payload)

    async def hello(self) -> bytes:
        return msgspec.msgpack.encode(Hello(self.name, self.settings.role, os.getpid(), self.metrics_port))

    async def health(self) -> bytes:
        return msgspec.msgpack.encode(Health(self.name, os.getpid(), self.waits.rows(), "torch" in sys.modules))

    async def start(self, peers: dict[str, Any]) -> WireError | None:
        """Open the actor with handles of the actors it talks to."""
        return await self._guarded(self.open(peers))

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


def _check_code(settings: Settings) -> None:
    """``actors`` is a generic name: another installed package of that name, or another version, must not run here unseen."""
    mine = code_digest()
    if mine != settings.code:
        raise RunFailed(
            f"every process runs the driver's code, got another one in {settings.name}: streamrl {streamrl.__version__} at {Path(streamrl.__path__[0])} "
            f"and actors at {Path(actors.__path__[0])}; install the same version on every node, and restart runs after an edit"
        )

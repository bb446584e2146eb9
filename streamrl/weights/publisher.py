"""Rolls a new policy version over the serving replicas, so that some of them always generate.

Guarantees: versions strictly grow and one publication runs at a time; ``publish`` returns when every replica that still serves holds the version;
a replica that fails or is late is out of rotation before the caller hears of it; a new replica holds the newest version before it counts as serving.
A replica that is *held* (``hold``) keeps its version: it doesn't serve until it is let go and holds the newest one, and a publication waits for it only
when no other serves.
Doesn't know how weights travel (a replica reads the manifest's file), and restarts nothing: ``on_failure`` tells the one who does. Needs no torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from streamrl.config.training import WeightsConfig
from streamrl.errors import ActorDied, ProtocolError, RunFailed, WaitTimeout, WeightMismatch
from streamrl.protocol.interfaces import Replica
from streamrl.protocol.topic import Topic
from streamrl.protocol.weights import WeightManifest, WeightReport

_log = logging.getLogger(__name__)


def _log_failure(name: str, error: BaseException) -> None:
    _log.error("replica %s is out of rotation: %s", name, error)


class Held(NamedTuple):
    """Replicas that keep ``version``. ``alone``: others serve meanwhile, under newer versions."""

    version: int
    replicas: list[Replica]
    alone: bool


class WeightPublisher:
    """``newest`` is the manifest being published, or published last: what a joining replica must hold."""

    def __init__(self, config: WeightsConfig, on_failure: Callable[[str, BaseException], None] = _log_failure) -> None:
        self.newest: WeightManifest | None = None
        self._config = config
        self._on_failure = on_failure
        self._serving: dict[str, Replica] = {}
        self._held: dict[str, Replica] = {}
        self._updates: dict[str, asyncio.Task[WeightReport]] = {}
        self._awaited: dict[str, float] = {}  # replicas that the publication under way waits for, and since when; 0: their turn has not come
        self._one_at_a_time = asyncio.Lock()
        self._returning: set[asyncio.Task[None]] = set()
        self._change = Topic()  # someone serves, or a held one has left
        self._ever_joined = False

    def replicas(self) -> list[str]:
        """Names of the serving replicas."""
        return sorted(self._serving)

    def held(self) -> list[str]:
        """Names of those that keep their version."""
        return sorted(self._held)

    def unacknowledged(self) -> dict[str, float]:
        """Replicas that do not hold the version being published yet, with the seconds they have had; 0: their turn has not come."""
        now = time.monotonic()
        return {name: now - since if since else 0.0 for name, since in self._awaited.items()}

    async def serving(self) -> list[Replica]:
        """The serving replicas, by name; waits for one to join when there is none just now (a restart is under way)."""
        if not await self._someone_serves():
            limit_s = self._config.publish_timeout_s
            raise WaitTimeout(f"a replica must join within weights.publish_timeout_s={limit_s:g}, got none; see the rollout actors' logs")
        return [self._serving[name] for name in self.replicas()]

    @asynccontextmanager
    async def hold(self, every: bool = False) -> AsyncIterator[Held]:
        """Some serving replicas stay at the newest version within the block: as many as may be unavailable at once, or the only one there is, or all."""
        async with self._one_at_a_time:  # no version is half way out
            serving = await self.serving()
            held = serving if every else serving[: min(self._most_unavailable(len(serving)), max(1, len(serving) - 1))]
            version = -1 if self.newest is None else self.newest.version
            self._held |= {replica.name: self._serving.pop(replica.name) for replica in held}
        try:
            yield Held(version, held, alone=bool(self._serving))
        finally:
            for replica in held:
                returning = asyncio.create_task(self._let_go(replica, version), name=f"{replica.name} serves again")
                self._returning.add(returning)
                returning.add_done_callback(self._returning.discard)

    async def _let_go(self, replica: Replica, version: int) -> None:
        """Serving again, with the newest version; nothing if it has left or was replaced meanwhile."""
        try:
            while self._held.get(replica.name) is replica:
                if self.newest is None or self.newest.version == version:
                    del self._held[replica.name]
                    self._serves(replica)  # no await since it was seen to hold the newest version
                    return
                version = (await self._load(replica, self.newest)).version
        except Exception as error:
            if self._held.get(replica.name) is replica:
                self.remove(replica.name)
                self._on_failure(replica.name, error)

    def _serves(self, replica: Replica) -> None:
        self._serving[replica.name] = replica
        self._ever_joined = True
        self._change.wake()

    async def join(self, replica: Replica) -> None:
        """Bring ``replica`` to the newest version, then count it as serving. Takes the place of an earlier replica of the same name.

        Raises what its update raised (WeightMismatch, WaitTimeout, ...); it does not serve then.
        """
        self.remove(replica.name)
        while True:
            target = self.newest
            if target is not None:
                await self._load(replica, target)
            if target is self.newest:  # nothing was published meanwhile; no await until it is registered
                break
        self._serves(replica)

    def remove(self, name: str) -> None:
        """Take ``name`` out of rotation; a publication under way no longer waits for it."""
        self._serving.pop(name, None)
        if self._held.pop(name, None) is not None:
            self._change.wake()
        task = self._updates.pop(name, None)
        if task is not None:
            task.cancel()

    async def publish(self, manifest: WeightManifest) -> list[WeightReport]:
        """All serving replicas hold ``manifest`` afterwards; their reports. RunFailed when none is left.

        A replica whose process died is being restarted by its owner: when none is left for that reason alone, the next one to join
        (which loads this manifest first) ends the wait. Before the first replica has joined there is nobody to wait for.
        """
        async with self._one_at_a_time:
            if self.newest is not None and manifest.version <= self.newest.version:
                raise ProtocolError(f"versions strictly grow, got {manifest.version} after {self.newest.version}; each update is published once")
            self.newest = manifest
            reports, errors = await self._roll(manifest)
            if not self._serving and self._ever_joined:
                await self._wait_for_a_replica(manifest, errors)
            return reports

    async def _roll(self, manifest: WeightManifest) -> tuple[list[WeightReport], list[BaseException]]:
        names = self.replicas()
        limit = asyncio.Semaphore(self._most_unavailable(len(names)))
        self._awaited = dict.fromkeys(names, 0.0)
        try:
            outcomes = await asyncio.gather(*(self._turn(name, manifest, limit) for name in names))
        finally:
            self._awaited = {}
        reports = [outcome for outcome in outcomes if isinstance(outcome, WeightReport)]
        return reports, [outcome for outcome in outcomes if isinstance(outcome, BaseException)]

    def _most_unavailable(self, count: int) -> int:
        return self._config.max_unavailable or max(1, count // 2)

    async def _turn(self, name: str, manifest: WeightManifest, limit: asyncio.Semaphore) -> WeightReport | BaseException | None:
        """One replica's update when its turn comes: its report, its failure, or None when it left meanwhile."""
        async with limit:
            replica = self._serving.get(name)
            if replica is None:
                return None
            task = asyncio.create_task(self._load(replica, manifest), name=f"publish v{manifest.version} to {name}")
            self._updates[name] = task
            self._awaited[name] = time.monotonic()
            try:
                await asyncio.wait([task])
            finally:
                self._awaited.pop(name, None)
                task.cancel()  # a no-op unless the publication itself was cancelled
                if self._updates.get(name) is task:
                    del self._updates[name]
            if task.cancelled():
                return None
            error = task.exception()
            if error is None:
                return task.result()
        if self._serving.get(name) is replica:
            del self._serving[name]
        self._on_failure(name, error)
        return error

    async def _load(self, replica: Replica, manifest: WeightManifest) -> WeightReport:
        limit_s = self._config.publish_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                report = await replica.update_weights(manifest)
        except TimeoutError as error:
            raise WaitTimeout(
                f"replica {replica.name} must acknowledge version {manifest.version} within weights.publish_timeout_s={limit_s:g}, got no answer; "
                "it is taken out of rotation"
            ) from error
        if report.version != manifest.version:
            raise WeightMismatch(f"replica {replica.name} must hold version {manifest.version}, got {report.version}; it is taken out of rotation")
        return report

    async def _wait_for_a_replica(self, manifest: WeightManifest, errors: list[BaseException]) -> None:
        final = [error for error in errors if not isinstance(error, ActorDied)]
        if not final or self._held:
            if await self._someone_serves():
                return
            final = [*errors, WaitTimeout(f"no replica joined within weights.publish_timeout_s={self._config.publish_timeout_s:g}")]
        raise RunFailed(f"a publication needs one healthy replica, got none for version {manifest.version}: {final[0]}") from final[0]

    async def _someone_serves(self) -> bool:
        """Waits for a replica when none serves. False when none came in time; one that is held comes in time, whoever holds it has a deadline."""
        loop, limit_s = asyncio.get_running_loop(), self._config.publish_timeout_s
        deadline = loop.time() + limit_s
        while not self._serving:
            if self._held:
                deadline = loop.time() + limit_s
            if not await self._change.wait_until(deadline) and not self._held:
                return False
        return True

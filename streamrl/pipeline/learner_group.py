"""All learner ranks as one: metadata goes out to each, the already reduced report of rank 0 comes back."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

from streamrl.errors import ProtocolError
from streamrl.protocol.interfaces import Learner
from streamrl.protocol.learn import StageReport, StepUpdates, UpdateReport, UpdateWork
from streamrl.protocol.meta import KVBatchMeta
from streamrl.protocol.rpc import methods_of
from streamrl.protocol.waits import WaitTable
from streamrl.protocol.weights import WeightManifest

T = TypeVar("T")


class AsyncLearner(Protocol):
    """One rank behind an async call: a client of an actor, or a ``Threaded`` rank."""

    async def rm_scores(self, share: KVBatchMeta) -> StageReport: ...
    async def log_probs(self, share: KVBatchMeta) -> StageReport: ...
    async def ref_log_probs(self, share: KVBatchMeta) -> StageReport: ...
    async def values(self, share: KVBatchMeta) -> StageReport: ...
    async def advantages(self, batch: KVBatchMeta) -> StageReport: ...
    async def update_critic(self, work: UpdateWork) -> UpdateReport: ...
    async def update(self, work: UpdateWork) -> UpdateReport: ...
    async def last_updates(self) -> StepUpdates | None: ...
    async def snapshot(self, version: int) -> WeightManifest | None: ...
    async def stage(self) -> None: ...
    async def save(self, folder: str) -> None: ...
    async def load(self, folder: str) -> None: ...


class Threaded:
    """An object whose methods run one after another in a thread of their own, so that the event loop keeps answering; ``save`` in a second one.

    Collectives and optimizer steps block for seconds; health questions must not wait for them, nor training for a disk. ``waits`` shows which call runs
    since when, and what it waits for in there.
    """

    def __init__(self, target: Learner, waits: WaitTable | None = None) -> None:
        self._waits = waits or WaitTable("learner")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        for name in methods_of(Learner):
            if inspect.ismethod(method := getattr(target, name)):
                setattr(self, name, self._in_thread(name, method, self._writer if name == "save" else None))

    def _in_thread(self, name: str, method: Callable[..., Any], thread: ThreadPoolExecutor | None = None) -> Callable[..., Awaitable[Any]]:
        def run(*args: Any) -> Any:
            with self._waits.activity(name):
                result = method(*args)
            self._waits.progressed()
            return result

        async def call(*args: Any) -> Any:
            return await asyncio.get_running_loop().run_in_executor(thread or self._thread, partial(run, *args))

        return call

    def close(self) -> None:
        for thread in (self._thread, self._writer):
            thread.shutdown(wait=False, cancel_futures=True)


class RankGroup:
    """Implements ``LearnerGroup``. All ranks are called at once, since every call is a collective."""

    def __init__(self, ranks: Sequence[AsyncLearner]) -> None:
        self._ranks = list(ranks)
        self.ranks = len(self._ranks)

    async def rm_scores(self, shares: list[KVBatchMeta]) -> StageReport:
        return (await self._all([rank.rm_scores(share) for rank, share in self._dealt(shares)]))[0]

    async def log_probs(self, shares: list[KVBatchMeta]) -> StageReport:
        return (await self._all([rank.log_probs(share) for rank, share in self._dealt(shares)]))[0]

    async def ref_log_probs(self, shares: list[KVBatchMeta]) -> StageReport:
        return (await self._all([rank.ref_log_probs(share) for rank, share in self._dealt(shares)]))[0]

    async def values(self, shares: list[KVBatchMeta]) -> StageReport:
        return (await self._all([rank.values(share) for rank, share in self._dealt(shares)]))[0]

    async def advantages(self, batch: KVBatchMeta) -> StageReport:
        return await self._ranks[0].advantages(batch)

    async def update_critic(self, works: list[UpdateWork]) -> UpdateReport:
        return (await self._all([rank.update_critic(work) for rank, work in self._dealt(works)]))[0]

    async def update(self, works: list[UpdateWork]) -> UpdateReport:
        return (await self._all([rank.update(work) for rank, work in self._dealt(works)]))[0]

    async def last_updates(self) -> StepUpdates | None:
        return (await self._all([rank.last_updates() for rank in self._ranks]))[0]

    async def snapshot(self, version: int) -> WeightManifest:
        manifest = (await self._all([rank.snapshot(version) for rank in self._ranks]))[0]
        if manifest is None:
            raise ProtocolError(f"rank 0 returns the manifest of version {version}, got None; check the rank numbers of the learner")
        return manifest

    async def stage(self) -> None:
        await self._all([rank.stage() for rank in self._ranks])

    async def save(self, folder: str) -> None:
        await self._all([rank.save(folder) for rank in self._ranks])

    async def load(self, folder: str) -> None:
        await self._all([rank.load(folder) for rank in self._ranks])

    def _dealt(self, shares: list[T]) -> list[tuple[AsyncLearner, T]]:
        if len(shares) != self.ranks:
            raise ProtocolError(f"every rank gets one share, got {len(shares)} shares for {self.ranks} ranks; deal with plan_shares")
        return list(zip(self._ranks, shares, strict=True))

    @staticmethod
    async def _all(calls: list[Awaitable[Any]]) -> list[Any]:
        """The first failure ends the wait: the other ranks may be stuck in a collective with the failed one."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

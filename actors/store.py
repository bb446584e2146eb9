"""Store actor, one per node: lends shared-memory segments and knows where every column of every row lies."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.host import Host
from actors.remote import client
from streamrl.config import Config
from streamrl.dataplane import IndexCalls, Store
from streamrl.pipeline import build
from streamrl.telemetry.run_folder import RunFolder


class StoreActor(Host):
    """Serves ``IndexCalls``; its own loop only waits for the end."""

    async def open(self, peers: dict[str, Any]) -> None:
        self._closed = asyncio.Event()
        self.index = build.build_index(self.config, self.folder.run_id, self.settings.driver_pid, self.folder.ledger)
        await self.serve(IndexCalls, self.index)

    async def work(self) -> None:
        await self._closed.wait()

    async def close(self) -> None:
        self.index.close()
        self._closed.set()


def store_client(handle: Any, writer: str, config: Config, folder: RunFolder) -> Store:
    """The store as another actor uses it: index calls travel, bytes lie in shared memory. Called inside a running event loop."""
    patience_s = config.cluster.restart_patience_s
    index = client(handle, "store", IndexCalls, limit_s=config.dataplane.put_timeout_s + 30, folder=folder, patience_s=patience_s)
    return Store(index, writer=writer, folder=None, config=config.dataplane, loop=asyncio.get_running_loop())

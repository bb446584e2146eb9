"""Store actor, one per node: lends shared-memory segments and knows where every column of every row lies."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from actors.host import Host
from actors.remote import client
from streamrl.config.rollout import DataplaneConfig
from streamrl.dataplane import IndexCalls, Store, StoreIndex
from streamrl.telemetry.run_folder import RunFolder


class StoreActor(Host):
    """Serves ``IndexCalls``; its own loop only waits for the end."""

    async def open(self, peers: dict[str, Any]) -> None:
        self._closed = asyncio.Event()
        shm_dir, run_id = Path(self.config.dataplane.shm_dir), self.folder.run_id
        self.index = StoreIndex(shm_dir, run_id, self.config.dataplane, self.settings.driver_pid)
        await self.serve(IndexCalls, self.index)

    async def work(self) -> None:
        await self._closed.wait()

    async def close(self) -> None:
        self.index.close()
        self._closed.set()


def store_client(handle: Any, writer: str, config: DataplaneConfig, folder: RunFolder) -> Store:
    """The store as another actor uses it: index calls travel, bytes lie in shared memory. Called inside a running event loop."""
    index = client(handle, "store", IndexCalls, limit_s=config.put_timeout_s + 30, folder=folder)
    return Store(index, writer=writer, folder=None, config=config, loop=asyncio.get_running_loop())

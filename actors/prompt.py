"""Prompt actor: serves dataset rows as named prompts and keeps the replay buffer supplied with them, from the last one that was admitted."""

from __future__ import annotations

from typing import Any

from actors.host import Host
from actors.remote import client
from streamrl.pipeline import build
from streamrl.pipeline.loops import POLL_S, feed_prompts
from streamrl.protocol.interfaces import PromptSource, Replay


class PromptActor(Host):
    """Runs ``feed_prompts``; serves ``PromptSource``."""

    async def open(self, peers: dict[str, Any]) -> None:
        self.prompts = build.build_prompts(self.config)
        patience_s = self.config.cluster.restart_patience_s
        self.replay = client(peers["replay"], "replay", Replay, limit_s=POLL_S + patience_s, folder=self.folder, patience_s=patience_s)
        await self.serve(PromptSource, self.prompts)

    async def work(self) -> None:
        frontier = (await self.replay.snapshot()).frontier
        if frontier is not None:  # what was handed out and not admitted is handed out again
            epoch, position = frontier
            await self.prompts.restore(await self.prompts.state() | {"epoch": epoch, "position": position})
        await feed_prompts(
            self.prompts,
            self.replay,
            chunk=self.config.data.train_batch_size,
            waits=self.waits,
            metrics=self.metrics,
            limit_s=self.config.replay.take_timeout_s,
        )

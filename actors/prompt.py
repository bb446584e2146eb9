"""Prompt actor: serves dataset rows as named prompts and keeps the replay buffer supplied with them."""

from __future__ import annotations

from typing import Any

from actors.host import Host
from actors.remote import client
from streamrl.pipeline import build
from streamrl.pipeline.loops import POLL_S, feed_prompts
from streamrl.protocol.interfaces import Admission, PromptSource


class PromptActor(Host):
    """Runs ``feed_prompts``; serves ``PromptSource``."""

    async def open(self, peers: dict[str, Any]) -> None:
        self.prompts = build.build_prompts(self.config)
        self.replay = client(peers["replay"], "replay", Admission, limit_s=POLL_S + 55, folder=self.folder)
        await self.serve(PromptSource, self.prompts)

    async def work(self) -> None:
        await feed_prompts(self.prompts, self.replay, chunk=self.config.data.train_batch_size, waits=self.waits, metrics=self.metrics)

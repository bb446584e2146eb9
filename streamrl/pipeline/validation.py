"""Validation: greedy answers of the serving replicas to the validation rows, scored by the same rules as training."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

from streamrl.errors import ActorDied, EngineError, RunFailed
from streamrl.pipeline.waits import WaitTable
from streamrl.protocol.interfaces import PromptSource
from streamrl.weights.publisher import WeightPublisher

RETRY_S = 1.0  # until the supervisor has noticed the death and detached the replica

log = logging.getLogger(__name__)


class Validator:
    """Deals the validation rows to the replicas and averages their scores. Rows are read once."""

    def __init__(self, prompts: PromptSource, waits: WaitTable, *, limit_s: float) -> None:
        self._prompts = prompts
        self._waits = waits
        self._limit_s = limit_s
        self._rows: list[dict[str, Any]] | None = None

    async def accuracy(self, publisher: WeightPublisher) -> float | None:
        """Mean score over the rows that were scored; None without validation rows. Failed sessions are counted beside, never as 0."""
        if self._rows is None:
            self._rows = await self._prompts.validation_rows()
        if not self._rows:
            return None
        scored = await self._waits.limit(self._scores(publisher, self._rows), "validation scores", "rollout actors", self._limit_s)
        scores = [score for score in scored if not math.isnan(score)]
        failed = len(self._rows) - len(scores)
        if failed:
            log.warning("%d of %d validation rows failed; they are not part of the mean", failed, len(self._rows))
        if not scores:
            raise RunFailed(f"validation needs at least one scored row, got {failed} failed sessions; see the rollout actors' logs for the first error")
        return sum(scores) / len(scores)

    async def _scores(self, publisher: WeightPublisher, rows: list[dict[str, Any]]) -> list[float]:
        """Deal the rows to the serving replicas; when one dies or its engine breaks meanwhile, deal again to those that serve then."""
        while True:
            replicas = await publisher.serving()
            shares = [rows[i :: len(replicas)] for i in range(len(replicas))]
            calls = [replica.evaluate(share) for replica, share in zip(replicas, shares, strict=True) if share]
            try:
                return [score for part in await asyncio.gather(*calls) for score in part]
            except (ActorDied, EngineError) as error:
                log.warning("validation starts again: %s", error)
                await asyncio.sleep(RETRY_S)

"""Validation: answers of serving replicas to the validation rows, sampled by ``rollout.val_kwargs`` and scored by the same rules as training.

Guarantees: all answers of one validation come from one weight version. It runs beside training: the replicas that answer keep their version (``hold``)
and lease no groups meanwhile, while the others take up newer ones; if there is one replica only, its next version waits until it has answered.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from streamrl.errors import ActorDied, EngineError, ProtocolError, RunFailed
from streamrl.pipeline.val_metrics import validation_metrics
from streamrl.protocol.interfaces import PromptSource
from streamrl.protocol.validation import ValQuestion, ValResult
from streamrl.protocol.waits import WaitTable
from streamrl.weights.publisher import Held, WeightPublisher

RETRY_S = 1.0  # until the supervisor has noticed the death and detached the replica

log = logging.getLogger(__name__)


class Validation(msgspec.Struct, frozen=True):
    """``accuracy``: the mean score of all answers that were scored. ``metrics`` by verl's names."""

    version: int
    accuracy: float
    metrics: dict[str, float]


class Validator:
    """Deals the validation rows to replicas and judges their scores. Rows are read once."""

    def __init__(self, prompts: PromptSource, waits: WaitTable, *, limit_s: float, samples: int = 1, source_key: str = "data_source") -> None:
        self._prompts = prompts
        self._waits = waits
        self._limit_s = limit_s
        self._samples = samples
        self._source_key = source_key
        self._questions: list[ValQuestion] | None = None

    async def validate(self, publisher: WeightPublisher, *, every_replica: bool = False) -> Validation | None:
        """None without validation rows. Failed sessions are counted beside, never as 0. ``every_replica``: no version need come out meanwhile."""
        if self._questions is None:
            self._questions = ask(await self._prompts.validation_rows(), self._samples)
        questions = self._questions
        if not questions:
            return None
        version, results = await self._waits.limit(self._answers(publisher, questions, every_replica), "validation scores", "rollout actors", self._limit_s)
        return Validation(version, accuracy(results), await asyncio.to_thread(validation_metrics, questions, results, self._source_key))

    async def _answers(self, publisher: WeightPublisher, questions: list[ValQuestion], every_replica: bool) -> tuple[int, list[ValResult]]:
        """All from one version; when a replica dies or its engine breaks meanwhile, all again from what serves then."""
        while True:
            try:
                async with publisher.hold(every_replica) as held:
                    return held.version, await _deal(held, questions)
            except (ActorDied, EngineError) as error:
                log.warning("validation starts again: %s", error)
                await asyncio.sleep(RETRY_S)


async def _deal(held: Held, questions: list[ValQuestion]) -> list[ValResult]:
    count = len(held.replicas)
    calls = [replica.evaluate(questions[i::count], held.alone) for i, replica in enumerate(held.replicas) if questions[i::count]]
    shares = [iter(share) for share in await asyncio.gather(*calls)]
    results = [next(shares[i % count]) for i in range(len(questions))]  # in the order of the questions
    strange = [result.versions for result in results if result.versions not in (None, (held.version, held.version))]
    if strange:
        raise ProtocolError(f"a validation asks one version, got tokens of {strange[0]} in that of version {held.version}; this is a fault of streamrl")
    return results


def ask(rows: list[dict[str, Any]], samples: int) -> list[ValQuestion]:
    """``samples`` questions for each row, side by side."""
    return [ValQuestion(row, number, sample) for number, row in enumerate(rows) for sample in range(samples)]


def accuracy(results: list[ValResult]) -> float:
    """Mean score. RunFailed when nothing was scored."""
    scores = [result.score for result in results if result.score is not None]
    failed = len(results) - len(scores)
    if failed:
        log.warning("%d of %d validation sessions failed; they are not part of the mean", failed, len(results))
    if not scores:
        first = next((f": {result.error}" for result in results if result.error), "")
        raise RunFailed(f"validation needs at least one scored row, got {failed} failed sessions{first}; the rollout actors' logs have every error")
    return sum(scores) / len(scores)

"""What a rollout actor's engine is asked for, metered; and the tokens that no push tells the replay buffer of, until it has been told.

Guarantees: a token that the engine handed over is reported once, by a push or by a ``SpentReport``, unless the process dies before.
"""

from __future__ import annotations

from typing import Protocol

from streamrl.protocol.generate import GenerateRequest, GenerateResult
from streamrl.protocol.groups import SpentTokens
from streamrl.protocol.interfaces import Generate
from streamrl.protocol.spending import count_generated
from streamrl.telemetry.metrics import Metrics


class Metered:
    """``Generate`` over ``Generate``: its time is the actor's time in state ``generate``, its tokens are counted for the session that asks."""

    def __init__(self, generate: Generate, metrics: Metrics) -> None:
        self._generate = generate
        self._metrics = metrics

    async def __call__(self, request: GenerateRequest) -> GenerateResult:
        with self._metrics.state("generate"):
            result = await self._generate(request)
        count_generated(len(result.token_ids))
        if result.stop_reason == "abort":
            self._metrics.inc("streamrl_rollout_resumes_total", cause="abort")
        return result


class TellsSpent(Protocol):
    """The part of ``LeaseSource`` that hears of them."""

    async def spent(self, worker: str, spent: list[SpentTokens]) -> int: ...


class SpentReport:
    """Of one rollout actor: collected here, handed over with its heartbeats and after each validation."""

    def __init__(self, replay: TellsSpent, worker: str) -> None:
        self._replay = replay
        self._worker = worker
        self._groups: dict[str, int] = {}
        self._evaluation = 0

    def taken_away(self, uid: str, tokens: int) -> None:
        """Written for a group that this worker does not hold any more."""
        if tokens:
            self._groups[uid] = self._groups.get(uid, 0) + tokens

    def evaluated(self, tokens: int) -> None:
        self._evaluation += tokens

    async def hand_over(self) -> None:
        """Tell the replay buffer, if there is something to tell."""
        spent = [SpentTokens(tokens, uid) for uid, tokens in self._groups.items()]
        spent += [SpentTokens(self._evaluation)] if self._evaluation else []
        self._groups, self._evaluation = {}, 0
        if spent:
            await self._replay.spent(self._worker, spent)

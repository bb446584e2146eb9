"""Which scorer a row's score comes from: the custom function, the model for rows of style "model", the rule of their data source for others."""

from __future__ import annotations

from typing import Any, Protocol

from streamrl.errors import RewardError
from streamrl.protocol.answer import Answer, wants_model
from streamrl.rewards.scorer import Scorer


class ModelScorer(Protocol):
    """A model behind an engine or a server."""

    async def start(self) -> None: ...
    def check(self) -> None: ...
    def child_pids(self) -> list[int]: ...
    async def score(self, answer: Answer) -> tuple[float, dict[str, Any]]: ...
    async def close(self) -> None: ...


class Sources:
    """``model`` scores rows of style "model" here; with ``later`` the learner does, and nobody here."""

    def __init__(self, functions: Scorer, model: ModelScorer | None = None, *, later: bool = False) -> None:
        self._functions = functions
        self._model = model
        self._later = later

    def _is_modelled(self, row: dict[str, Any]) -> bool:
        return wants_model(row) and not self._functions.has_custom

    def scores_later(self, row: dict[str, Any]) -> bool:
        return self._later and self._is_modelled(row)

    def serves(self, row: dict[str, Any]) -> bool:
        if self._is_modelled(row):
            return self._later or self._model is not None
        return self._functions.serves(self._functions.source_of(row))

    async def score(self, answer: Answer) -> tuple[float, dict[str, Any]]:
        """(score, extra); RewardError for whatever is not a finite score."""
        if not self._is_modelled(answer.row):
            return await self._functions.score(answer.row, answer.text, answer.extra_info)
        if self._model is None:
            raise RewardError("a row with reward_model.style=model has a model that scores it, got none here; configure reward.judge or reward.remote")
        return await self._model.score(answer)

    async def start(self) -> None:
        if self._model is not None:
            await self._model.start()

    def check(self) -> None:
        if self._model is not None:
            self._model.check()

    def child_pids(self) -> list[int]:
        return self._model.child_pids() if self._model is not None else []

    async def close(self) -> None:
        await self._functions.close()
        if self._model is not None:
            await self._model.close()

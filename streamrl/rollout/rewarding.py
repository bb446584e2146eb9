"""What a session needs of the run's rewards; the rewards package has it. The two folders meet through this shape alone."""

from __future__ import annotations

from typing import Any, Protocol

from streamrl.protocol.answer import Answer


class RowScorer(Protocol):
    """Rewards of answers. ``start`` before the first, ``close`` after the last."""

    async def start(self) -> None: ...
    def check(self) -> None:
        """EngineError when what it asks can answer no more; its actor is then replaced."""
        ...

    def child_pids(self) -> list[int]: ...
    async def close(self) -> None: ...

    def serves(self, row: dict[str, Any]) -> bool:
        """Whether someone scores the row, now or later; where not, only its agent loop can."""
        ...

    def scores_later(self, row: dict[str, Any]) -> bool:
        """Whether the learner scores the row, after the rollout."""
        ...

    async def score(self, answer: Answer) -> tuple[float, dict[str, Any]]:
        """``(reward, extra)``; RewardError for whatever is not a finite number."""
        ...

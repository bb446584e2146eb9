"""What a session needs of a scorer; the rewards package has it. The two folders meet through this shape alone."""

from __future__ import annotations

from typing import Any, Protocol


class RowScorer(Protocol):
    """Scores of answers, by the row's data source."""

    def serves(self, source: str) -> bool:
        """Whether there is a score function for that source."""
        ...

    async def score(self, row: dict[str, Any], solution_str: str, extra_info: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """``(score, extra)`` of one answer to ``row``; RewardError for whatever is not a finite score."""
        ...

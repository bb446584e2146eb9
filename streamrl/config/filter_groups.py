"""``algorithm.filter_groups``: groups whose samples all score the same teach nothing and can be left out before training."""

from __future__ import annotations

from streamrl.config.base import Section, refuse


class FilterGroups(Section, frozen=True):
    """``metric`` is a number that the reward function returns (``score``, ``acc``, ...), or ``seq_final_reward``, the reward after shaping."""

    enable: bool = False
    metric: str = "score"  # before shaping

    def __post_init__(self) -> None:
        if not self.metric.strip():
            raise refuse("algorithm.filter_groups.metric", "must name a number of the reward function", self.metric, "use score or seq_final_reward")

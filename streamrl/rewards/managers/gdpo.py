"""``gdpo``: every answer has the components that ``algorithm.gdpo_reward_keys`` names, or its session fails. Under ``naive`` such a row would be
generated, stored and then left out by the estimator."""

from __future__ import annotations

import math
from typing import Any

from streamrl.errors import RewardError
from streamrl.protocol.answer import Answer
from streamrl.rewards.managers.base import RewardManager


class GdpoManager(RewardManager):
    def shape(self, answer: Answer, score: float, extra: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        for name in self.settings.components:
            value = extra.get(name)
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise RewardError(f"a score has the component {name!r} of algorithm.gdpo_reward_keys as a finite number, got {value!r}; return it")
        return score, extra

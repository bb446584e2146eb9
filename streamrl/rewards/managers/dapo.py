"""``dapo``: a score minus a penalty for answers that come close to the longest allowed one.

The last ``overlong_buffer.len`` = b tokens of ``data.max_response_length`` = m cost, at n tokens::

    min(-(n - (m - b)) / b * penalty_factor, 0)          m 1000, b 200, factor 1:  n 800, 900, 1000  ->  0, -0.5, -1
"""

from __future__ import annotations

from typing import Any

from streamrl.config.reward import OverlongBuffer
from streamrl.protocol.answer import Answer
from streamrl.rewards.managers.base import RewardManager


def overlong_penalty(num_tokens: int, max_response_length: int, buffer: OverlongBuffer) -> float:
    """At most 0."""
    exceeded = num_tokens - (max_response_length - buffer.len)
    return min(-exceeded / buffer.len * buffer.penalty_factor, 0.0)


class DapoManager(RewardManager):
    def shape(self, answer: Answer, score: float, extra: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        buffer = self.settings.reward.overlong_buffer
        if not buffer.enable:
            return score, extra
        penalty = overlong_penalty(answer.num_tokens, self.settings.max_response_length, buffer)
        if buffer.log:
            extra = {**extra, "overlong_reward": penalty, "overlong": penalty < 0}
        return score + penalty, extra

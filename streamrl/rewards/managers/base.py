"""The reward manager: what a run makes of a score. This one, ``naive``, takes the score as the reward; the others override a hook.

A rollout calls it for one session at its end. The same object scores a padded DataProto (``manager(data)``, or ``await manager.score_batch(data)``
where an event loop runs), with the same numbers. Turn rewards (``reward.turn_level``) are the rollout's own and not part of that.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import msgspec

from streamrl.config.reward import RewardConfig
from streamrl.errors import ConfigError, RewardError
from streamrl.protocol.answer import Answer
from streamrl.protocol.chat import ChatTokenizer
from streamrl.protocol.clock import SystemClock
from streamrl.protocol.interfaces import Clock
from streamrl.rewards.sources import Sources

if TYPE_CHECKING:
    from streamrl.protocol.dataproto import DataProto


class ManagerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a manager knows of the run."""

    reward: RewardConfig = RewardConfig()
    max_response_length: int  # data.max_response_length
    components: tuple[str, ...] = ()  # algorithm.gdpo_reward_keys
    num_actors: int = 1  # rollout actors, each with a manager of its own


class RewardManager:
    """Override ``ask`` to change when or how a score is asked for, ``shape`` to make another reward of it. A reward model of the learner
    (``reward.reward_model``) is asked there, so of its rows only ``shape`` sees anything."""

    def __init__(self, sources: Sources, settings: ManagerSettings, *, tokenizer: ChatTokenizer | None = None, clock: Clock | None = None) -> None:
        self.settings = settings
        self.sources = sources
        self.clock: Clock = clock or SystemClock()
        self.tokenizer = tokenizer  # None: no padded batches

    async def start(self) -> None:
        """Before the first answer: start a judge's engine, read a remote scorer's headers."""
        await self.sources.start()

    async def close(self) -> None:
        await self.sources.close()

    def check(self) -> None:
        self.sources.check()

    def child_pids(self) -> list[int]:
        return self.sources.child_pids()

    def serves(self, row: dict[str, Any]) -> bool:
        return self.sources.serves(row)

    def scores_later(self, row: dict[str, Any]) -> bool:
        return self.sources.scores_later(row)

    async def score(self, answer: Answer) -> tuple[float, dict[str, Any]]:
        """``(reward, extra)``; RewardError for whatever is not a finite reward. ``extra["score"]`` is the score before shaping."""
        return self.shaped(answer, *await self.ask(answer))

    async def ask(self, answer: Answer) -> tuple[float, dict[str, Any]]:
        """The score of one answer and what its scorer returned beside it."""
        return await self.sources.score(answer)

    def shape(self, answer: Answer, score: float, extra: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """The reward of one answer and what is to be known of it."""
        return score, extra

    def shaped(self, answer: Answer, score: float, extra: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """:meth:`shape`, with a reward that is finite."""
        reward, extra = self.shape(answer, score, extra)
        if not math.isfinite(reward):
            raise RewardError(f"a reward is finite, got {reward} from {type(self).__name__}.shape; correct it")
        return reward, extra

    def __call__(self, data: DataProto) -> DataProto:
        """:meth:`score_batch` in an event loop of its own; workers and connections end with it."""
        return asyncio.run(self._score_and_close(data))

    async def score_batch(self, data: DataProto) -> DataProto:
        """``rm_scores`` [B, R] and ``reward_extra_info`` of padded rows, as ``to_padded_dataproto`` makes them."""
        from streamrl.rewards.padded import score_batch  # needs torch

        if self.tokenizer is None:
            raise ConfigError("a manager reads a padded batch with the policy's tokenizer, got none; pass tokenizer to rewards.build")
        return await score_batch(self, data, self.tokenizer)

    async def _score_and_close(self, data: DataProto) -> DataProto:
        try:
            await self.start()
            return await self.score_batch(data)
        finally:
            await self.close()

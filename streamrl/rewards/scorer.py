"""Scores by functions: which one, where it runs, how long it may take, and what counts as a score.

A score is finite or the call ends in RewardError: an exception, a timeout, None, NaN or infinity never become 0.0, since a policy would
learn from it. Which session is scored, and what is made of the score, is the caller's business.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
from collections.abc import Iterable
from typing import Any

from streamrl.config.data import DataConfig
from streamrl.config.paths import resolve
from streamrl.config.reward import RewardConfig
from streamrl.errors import ConfigError, RewardError
from streamrl.protocol.clock import SystemClock
from streamrl.protocol.deadline import within
from streamrl.protocol.interfaces import Clock
from streamrl.protocol.waits import begun
from streamrl.rewards import minerva, rules  # noqa: F401  (registers the rule scorers)
from streamrl.rewards.edge import as_reward_error
from streamrl.rewards.load import load_function
from streamrl.rewards.registry import Entry, check_source, find, known_sources, serves
from streamrl.rewards.worker import Target, WorkerPool

POOL_SIZE = 2  # worker processes per score function of a rollout process


class Scorer:
    """``await scorer.score(row, solution_str, extra_info)``; :meth:`check` at start-up, :meth:`close` at the end. A custom function is loaded now,
    so that a wrong path or name fails at start-up."""

    def __init__(self, reward: RewardConfig, data: DataConfig, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._timeout_s = reward.timeout_s
        self._source_key = data.reward_fn_key
        self._custom: tuple[Entry, Target] | None = None
        if reward.custom_reward_function is not None:
            target = Target(resolve(reward.custom_reward_function.path), reward.custom_reward_function.name, is_file=True)
            function = load_function(target)
            self._custom = Entry("reward.custom_reward_function", function, getattr(function, "inline", False)), target
        self._pools: dict[Target, WorkerPool] = {}

    @property
    def has_custom(self) -> bool:
        """Whether one custom function scores every row."""
        return self._custom is not None

    def source_of(self, row: dict[str, Any]) -> str:
        return str(row.get(self._source_key, ""))

    def check(self, sources: Iterable[str]) -> None:
        """ConfigError when a source of the data has no scorer, or those of two packages. With a custom function every source is fine."""
        sources = set(sources)
        unknown = sorted(source for source in sources if not self.serves(source))
        if unknown:
            known = ", ".join(known_sources())
            raise ConfigError(
                f"$.data: every data_source has a scorer, got {', '.join(unknown)} (known: {known}); register one or set reward.custom_reward_function"
            )
        if self._custom is None:
            for source in sorted(sources):
                check_source(source)

    def serves(self, source: str) -> bool:
        """Whether rows of this source are scored here; where not, only their agent loop can."""
        return self._custom is not None or serves(source)

    async def score(self, row: dict[str, Any], solution_str: str, extra_info: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """(score, everything the function returned beside it, ``acc`` included). RewardError for whatever is not a finite score."""
        source = self.source_of(row)
        entry, target = self._entry(source)
        args = [source, solution_str, (row.get("reward_model") or {}).get("ground_truth"), copy.deepcopy(extra_info)]
        with as_reward_error(entry.name, self._timeout_s):
            return read_score(entry.name, await self._call(entry, target, args))

    async def close(self) -> None:
        """End all worker processes."""
        pools, self._pools = list(self._pools.values()), {}
        await asyncio.gather(*(pool.close() for pool in pools))

    def _entry(self, source: str) -> tuple[Entry, Target]:
        if self._custom is not None:
            return self._custom
        entry = find(source)
        if entry is None:
            raise RewardError(f"every data_source has a scorer, got {source!r} (known: {', '.join(known_sources())}); register one")
        return entry, Target.of(entry.function)

    async def _call(self, entry: Entry, target: Target, args: list[Any]) -> Any:
        if not entry.inline and not inspect.iscoroutinefunction(entry.function):
            return await self._pool(target).call(args, self._timeout_s)
        with begun(self._timeout_s):
            result = entry.function(*args)
            return await within(result, self._timeout_s, entry.name, self._clock) if inspect.isawaitable(result) else result

    def _pool(self, target: Target) -> WorkerPool:
        if target not in self._pools:
            self._pools[target] = WorkerPool(target, POOL_SIZE, self._clock)
        return self._pools[target]


def read_score(name: str, result: Any) -> tuple[float, dict[str, Any]]:
    """(score, extra) of what a score function returned: a number, or a dict with ``score``.

    >>> read_score("f", {"score": 0.5, "pred": "7"})
    (0.5, {'score': 0.5, 'pred': '7', 'acc': 0.5})
    """
    extra = dict(result) if isinstance(result, dict) else {"score": result}
    try:
        score = float(extra["score"])
    except (KeyError, TypeError, ValueError) as error:
        raise RewardError(f"a reward function returns a number or a dict with 'score', got {result!r} from {name}; correct it") from error
    if not math.isfinite(score):
        raise RewardError(f"a score is finite, got {score} from {name}; correct the function")
    return score, {"acc": score, **extra, "score": score}

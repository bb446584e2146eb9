"""Any environment with ``reset`` and ``step``, in the manner of Gym (4 values) or Gymnasium (5 values). Needs neither package.

    config: {factory: "my_envs:make", factory_kwargs: {...}, parse: "my_envs:to_action", max_steps: 50, observe_first: true}
    interaction_kwargs: {seed: 7, env_kwargs: {...}}

The action is the model's text, or what ``parse`` makes of it; a ValueError of ``parse`` is told to the model and costs a step, without one of the
environment. Observations are shown as ``str`` gives them. ``observe_first``: the model's first answer is no action, it gets the first observation.
All calls of an environment run in threads, one at a time, not always the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from streamrl.config.base import Positive, Section
from streamrl.errors import ConfigError
from streamrl.rollout.interactions.answers import arguments, last_answer, settings
from streamrl.rollout.interactions.base import BaseInteraction
from streamrl.rollout.interactions.registry import register_interaction
from streamrl.rollout.locate import locate


class GymConfig(Section, frozen=True):
    factory: str  # package.module:name or file.py:name; called once per session
    factory_kwargs: dict[str, Any] = {}
    parse: str | None = None  # text -> action; None: the text itself
    max_steps: Positive = 50  # answers that were taken for actions
    observe_first: bool = True  # false: the row's prompt shows the first observation


class GymTask(Section, frozen=True):
    seed: int | None = None  # of reset; None: reset without a seed
    env_kwargs: dict[str, Any] = {}  # added to factory_kwargs


class _Game(msgspec.Struct):
    env: Any
    opening: str | None  # the first observation while it has not been shown
    num_steps: int = 0
    total: float = 0.0


@register_interaction("gym")
class GymInteraction(BaseInteraction):
    """Each step's reward is its turn's score; the session's score is their sum."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._config = settings(config, GymConfig)
        self._factory = _callable(self._config.factory, "config.factory")
        self._parse = _callable(self._config.parse, "config.parse") if self._config.parse else None
        self._games: dict[str, _Game] = {}

    def start_interaction(self, instance_id: str, **interaction_kwargs: Any) -> str:  # type: ignore[override]
        task = arguments(interaction_kwargs, GymTask)
        env = self._factory(**{**self._config.factory_kwargs, **task.env_kwargs})
        game = self._games[instance_id] = _Game(env, None)  # kept before reset, which may fail: close must find it
        observed = env.reset() if task.seed is None else env.reset(seed=task.seed)
        if self._config.observe_first:
            game.opening = str(_first(observed))
        return instance_id

    def generate_response(  # type: ignore[override]
        self, instance_id: str, messages: list[dict[str, Any]], **interaction_kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        game = self._games[instance_id]
        if game.opening is not None:
            opening, game.opening = game.opening, None
            return False, opening, 0.0, {}
        game.num_steps += 1
        over = game.num_steps >= self._config.max_steps
        text = last_answer(messages)
        try:
            action = self._parse(text) if self._parse else text
        except ValueError as error:
            return over, f"That is no action: {error}", 0.0, {}
        observation, reward, ended = _stepped(game.env.step(action))
        game.total += float(reward)
        return ended or over, str(observation), float(reward), {}

    async def calculate_score(self, instance_id: str) -> float:
        return self._games[instance_id].total

    def finalize_interaction(self, instance_id: str) -> None:  # type: ignore[override]
        game = self._games.pop(instance_id, None)
        close = getattr(game.env, "close", None) if game else None
        if close is not None:
            close()


def _callable(path: str, key: str) -> Callable[..., Any]:
    found = locate(path, key)
    if not callable(found):
        raise ConfigError(f"{key}: a path names a function or class, got {path} = {found!r:.80}; correct it")
    return found


def _first(observed: Any) -> Any:
    """Gymnasium's reset gives (observation, info), Gym's the observation alone."""
    return observed[0] if isinstance(observed, tuple) and len(observed) == 2 and isinstance(observed[1], dict) else observed


def _stepped(values: Any) -> tuple[Any, Any, bool]:
    if not isinstance(values, tuple) or len(values) not in (4, 5):
        got = f"{len(values)} values" if isinstance(values, tuple) else type(values).__name__
        raise TypeError(f"step returns 4 values (Gym) or 5 (Gymnasium), got {got}; correct the environment")
    return values[0], values[1], any(bool(flag) for flag in values[2:-1])

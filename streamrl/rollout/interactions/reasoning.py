"""Tasks of the library reasoning-gym, scored by their own rules; a wrong answer brings feedback and another try.

    config: {max_turns: 3, solved_at: 1.0}
    interaction_kwargs: {dataset: chain_sum, seed: 7, index: 4, options: {max_terms: 3}}    # or {dataset: chain_sum, entry: {...}}

The question belongs into the row's prompt. The answer is what stands between the last ``<answer>`` and ``</answer>``, without them all the text.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from typing import Any

import msgspec

from streamrl.config.base import NonNegative, Positive, Section, Share
from streamrl.errors import ConfigError
from streamrl.rollout.interactions.answers import arguments, last_answer, settings
from streamrl.rollout.interactions.base import BaseInteraction
from streamrl.rollout.interactions.registry import register_interaction

FEEDBACK = "That is not right. Look for the mistake and give the answer between <answer> and </answer> again."
MAX_DATASETS = 64  # kept generators; they are small, and rows of one run share them

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymConfig(Section, frozen=True):
    max_turns: Positive = 3  # answers of the model, the first included
    solved_at: Share = 1.0  # a score from here on ends the session


class ReasoningTask(Section, frozen=True):
    dataset: str
    seed: int = 0
    size: Positive | None = None  # None: index + 1
    index: NonNegative = 0
    options: dict[str, Any] = {}  # the dataset's own settings
    entry: dict[str, Any] | None = None  # a stored {question, answer, metadata}; then the fields above but dataset and options are not used


class _State(msgspec.Struct):
    dataset: Any
    entry: dict[str, Any]
    num_turns: int = 0
    score: float = 0.0


@functools.lru_cache(maxsize=MAX_DATASETS)
def _dataset(name: str, seed: int, size: int, options: str) -> Any:
    return importlib.import_module("reasoning_gym").create_dataset(name, seed=seed, size=size, **json.loads(options))


def answer_in(text: str) -> str:
    """
    >>> answer_in("<answer>3</answer> no <answer> 4 </answer>"), answer_in(" 5 ")
    ('4', '5')
    """
    found = _ANSWER.findall(text)
    return (found[-1] if found else text).strip()


@register_interaction("reasoning_gym")
class ReasoningGymInteraction(BaseInteraction):
    """Plain methods: they run in threads, for generating and scoring a task may take a while."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._config = settings(config, ReasoningGymConfig)
        try:
            importlib.import_module("reasoning_gym")
        except ImportError as error:
            raise ConfigError(f"reasoning_gym needs the package reasoning-gym, got {error}; pip install 'streamrl[reasoning-gym]'") from error
        self._states: dict[str, _State] = {}

    def start_interaction(self, instance_id: str, **interaction_kwargs: Any) -> str:  # type: ignore[override]
        task = arguments(interaction_kwargs, ReasoningTask)
        dataset = _dataset(task.dataset, task.seed, task.size or task.index + 1, json.dumps(task.options, sort_keys=True))
        self._states[instance_id] = _State(dataset, task.entry or dataset[task.index])
        return instance_id

    def generate_response(  # type: ignore[override]
        self, instance_id: str, messages: list[dict[str, Any]], **interaction_kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        state = self._states[instance_id]
        state.num_turns += 1
        state.score = float(state.dataset.score_answer(answer=answer_in(last_answer(messages)), entry=state.entry))
        if state.score >= self._config.solved_at:
            return True, "That is right.", state.score, {}
        if state.num_turns >= self._config.max_turns:
            return True, "That is not right.", state.score, {}
        return False, FEEDBACK, state.score, {}

    async def calculate_score(self, instance_id: str) -> float:
        """Of the last answer."""
        return self._states[instance_id].score

    async def finalize_interaction(self, instance_id: str) -> None:
        self._states.pop(instance_id, None)

"""A tutor for word problems with a number as answer, in the style of GSM8K: right ends the session with score 1, wrong brings a hint.

config: {max_hints: 3}
interaction_kwargs: {ground_truth: "72", hints: ["How many did she sell in May?"]}     # hints: the first ones; then a general one
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

from streamrl.config.base import NonNegative, Section
from streamrl.rollout.interactions.answers import arguments, last_answer, settings
from streamrl.rollout.interactions.base import BaseInteraction
from streamrl.rollout.interactions.registry import register_interaction

GENERAL_HINT = "That is not right. Go through each step again, then write the final number after ####."
NO_NUMBER = "I see no number in your answer. Write the final number after ####."

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")


class TutorConfig(Section, frozen=True):
    max_hints: NonNegative = 3  # a wrong answer after the last hint ends the session with score 0


class TutorTask(Section, frozen=True):
    ground_truth: str | int | float
    hints: list[str] = []


class _State(msgspec.Struct):
    task: TutorTask
    num_hints: int = 0
    score: float = 0.0


def final_number(text: str) -> Decimal | None:
    """The number after the last ``####``, without that mark the last number of the text; None when there is none.

    >>> final_number("3 + 4 = 7 #### $1,007.0"), final_number("so 12, no: 13."), final_number("none")
    (Decimal('1007.0'), Decimal('13'), None)
    """
    _, mark, end = text.rpartition("####")
    found = _NUMBER.findall(end)
    if not found:
        return None
    try:
        return Decimal((found[0] if mark else found[-1]).replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None


@register_interaction("tutor")
class TutorInteraction(BaseInteraction):
    """Numbers are compared as decimals: 72, 72.0 and $72 are equal, and none passes through float."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._config = settings(config, TutorConfig)
        self._states: dict[str, _State] = {}

    async def start_interaction(self, instance_id: str, **interaction_kwargs: Any) -> str:
        task = arguments(interaction_kwargs, TutorTask)
        if final_number(str(task.ground_truth)) is None:
            raise ValueError(f"a tutor's ground_truth is a number, got {task.ground_truth!r}; correct the row")
        self._states[instance_id] = _State(task)
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **interaction_kwargs: Any) -> tuple[bool, str, float, dict[str, Any]]:
        state = self._states[instance_id]
        number = final_number(last_answer(messages))
        if number is not None and number == final_number(str(state.task.ground_truth)):
            state.score = 1.0
            return True, "That is right.", 1.0, {}
        if state.num_hints >= self._config.max_hints:
            return True, "That is not right.", 0.0, {}
        hint = self._hint(state, number)
        state.num_hints += 1
        return False, hint, 0.0, {}

    def _hint(self, state: _State, number: Decimal | None) -> str:
        if state.num_hints < len(state.task.hints):
            return state.task.hints[state.num_hints]
        return NO_NUMBER if number is None else GENERAL_HINT

    async def calculate_score(self, instance_id: str) -> float:
        return self._states[instance_id].score

    async def finalize_interaction(self, instance_id: str) -> None:
        self._states.pop(instance_id, None)

"""What an interaction is: a user simulator or an environment that answers the model until it ends the session."""

from __future__ import annotations

from typing import Any

import msgspec


class Turn(msgspec.Struct, frozen=True):
    """One answer of the environment. ``content`` becomes a user message, unless ``should_terminate``."""

    should_terminate: bool
    content: str
    score: float = 0.0
    additional: dict[str, Any] = {}


class BaseInteraction:
    """Base of interactions. One object serves all sessions of a process; what belongs to one is kept under its ``instance_id``.

    start_interaction → generate_response for each answer of the model → calculate_score, if the class overrides it → finalize_interaction,
    exactly once for each start, whatever happened.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name = str(config.get("name", type(self).__name__))

    async def start_interaction(self, instance_id: str, **interaction_kwargs: Any) -> str:
        """The arguments are the row's ``extra_info.interaction_kwargs``."""
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **interaction_kwargs: Any) -> tuple[bool, str, float, dict[str, Any]]:
        """(should_terminate, content, turn_score, additional)."""
        raise NotImplementedError

    async def calculate_score(self, instance_id: str) -> float:
        """The trajectory's reward when the run has no reward function for its row."""
        return 0.0

    async def finalize_interaction(self, instance_id: str) -> None:
        """End a session."""

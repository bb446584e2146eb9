"""Interactions: user simulators and environments that a session talks to. Importing the package registers those that ship."""

from streamrl.rollout.interactions import grid, gym, reasoning, tutor  # noqa: F401  (register themselves)
from streamrl.rollout.interactions.base import BaseInteraction, Turn
from streamrl.rollout.interactions.load import Interactions, check_interactions, load_interactions
from streamrl.rollout.interactions.registry import register_interaction
from streamrl.rollout.interactions.session import InteractionSession

__all__ = ["BaseInteraction", "InteractionSession", "Interactions", "Turn", "check_interactions", "load_interactions", "register_interaction"]

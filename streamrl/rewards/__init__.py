"""Scores of answers: rule scorers by ``data_source``, or the user's own function. Needs no torch."""

from streamrl.rewards.registry import ScoreFunction, known_sources, register_reward
from streamrl.rewards.scorer import Scorer, build

__all__ = ["ScoreFunction", "Scorer", "build", "known_sources", "register_reward"]

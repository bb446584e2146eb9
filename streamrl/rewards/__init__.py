"""Rewards of answers: rule scorers by ``data_source``, the user's own function, a judge or a remote scorer, and the manager that makes rewards of
their scores. Needs no torch, but for padded batches."""

from streamrl.protocol.answer import Answer
from streamrl.rewards.build import build
from streamrl.rewards.managers import RewardManager, register_reward_manager
from streamrl.rewards.registry import ScoreFunction, known_sources, register_reward
from streamrl.rewards.scorer import Scorer

__all__ = ["Answer", "RewardManager", "ScoreFunction", "Scorer", "build", "known_sources", "register_reward", "register_reward_manager"]

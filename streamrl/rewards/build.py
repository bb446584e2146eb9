"""The rewards of one process, from the configuration: sources of scores, and the manager around them."""

from __future__ import annotations

from streamrl.config.data import DataConfig
from streamrl.config.reward import RewardConfig
from streamrl.protocol.chat import ChatTokenizer
from streamrl.protocol.clock import SystemClock
from streamrl.protocol.interfaces import Clock
from streamrl.rewards.managers import ManagerSettings, RewardManager, manager_class
from streamrl.rewards.scorer import Scorer
from streamrl.rewards.sources import ModelScorer, Sources


def build(
    reward: RewardConfig,
    data: DataConfig,
    *,
    tokenizer: ChatTokenizer | None = None,  # of the policy; None: no padded batches
    judge: ModelScorer | None = None,  # reward.judge, which needs an engine
    components: tuple[str, ...] = (),  # algorithm.gdpo_reward_keys
    num_actors: int = 1,
    clock: Clock | None = None,
) -> RewardManager:
    """The manager that ``reward.reward_manager`` names. User code is loaded now, so that a wrong path or name fails at start-up."""
    clock = clock or SystemClock()
    model = judge
    if reward.remote is not None:
        from streamrl.rewards.remote import RemoteScorer  # imports an HTTP client

        model = RemoteScorer(reward.remote, data, reward.timeout_s, clock)
    sources = Sources(Scorer(reward, data, clock), model, later=reward.reward_model.enable)
    settings = ManagerSettings(reward=reward, max_response_length=data.max_response_length, components=components, num_actors=num_actors)
    return manager_class(reward.reward_manager)(sources, settings, tokenizer=tokenizer, clock=clock)

"""From a leased prompt to scored trajectories: chat template, agent loop, reward. Token ids in, token ids out. Needs no torch of its own."""

from streamrl.rollout.base import AgentLoopBase, AgentLoopOutput
from streamrl.rollout.chat import load_tokenizer
from streamrl.rollout.registry import check_agent_names, register_agent_loop
from streamrl.rollout.runner import GroupSessionRunner

__all__ = ["AgentLoopBase", "AgentLoopOutput", "GroupSessionRunner", "check_agent_names", "load_tokenizer", "register_agent_loop"]

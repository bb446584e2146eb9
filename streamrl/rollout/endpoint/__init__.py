"""An OpenAI-compatible endpoint on loopback, for agents that know nothing of streamrl."""

from streamrl.rollout.endpoint.black_box import BlackBoxAgentLoop

__all__ = ["BlackBoxAgentLoop"]

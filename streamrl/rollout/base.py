"""What an agent loop is: a class that turns one dataset row into token-aligned outputs. ``registry.py`` has them by name.

A loop sees an engine through ``Generate`` alone. It gets a fresh instance per session, so no state survives one.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

import msgspec

from streamrl.config.data import DataConfig
from streamrl.config.rollout import RolloutConfig
from streamrl.protocol.chat import ChatTokenizer
from streamrl.protocol.generate import SamplingParams
from streamrl.protocol.interfaces import Clock, Generate
from streamrl.rollout.session_metrics import SessionMetrics

if TYPE_CHECKING:
    from streamrl.rollout.interactions import Interactions
    from streamrl.rollout.tools import ToolBox


class AgentLoopOutput(msgspec.Struct, kw_only=True):
    """One row of a session. The four per-token lists are aligned at every moment.

    Worked example (one turn, answer of two tokens under version 4)::

        response_ids = [11, 2]   response_mask = [1, 1]   response_logprobs = [-.1, -.05]   rollout_versions = [4, 4]

    A token the model did not write has mask 0, log-prob 0.0 and version -1.
    """

    prompt_ids: list[int]  # what the engine received first
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None  # None = the run does not record them
    rollout_versions: list[int]
    stop_reason: str
    num_turns: int = 2  # user turns + assistant turns + 1
    reward_score: float | None = None  # None = the run's scorer decides
    turn_ends: list[int] = []  # for each of turn_scores the place of the last model token of its turn
    environment_score: float | None = None  # the reward where the run has no scorer for the row; None = nobody knows
    extra_fields: dict[str, Any] = msgspec.field(default_factory=lambda: {"turn_scores": [], "tool_rewards": []})


class AgentLoopBase(abc.ABC):
    """Base of all loops. ``generate`` already resumes aborted calls, checks what comes back and keeps the deadline of a call."""

    def __init__(
        self,
        *,
        rollout: RolloutConfig,
        data: DataConfig,
        tokenizer: ChatTokenizer,
        generate: Generate,
        tools: ToolBox,
        interactions: Interactions,
        clock: Clock,
        request_id: str,
    ) -> None:
        self.rollout = rollout
        self.data = data
        self.tokenizer = tokenizer
        self.generate = generate
        self.tools = tools
        self.interactions = interactions
        self.clock = clock
        self.metrics = SessionMetrics()  # reported when the session ends, however it ends
        self.request_id = request_id  # the same in all calls of the session, so that its prefix cache stays warm

    @classmethod
    def init_class(cls, *, rollout: RolloutConfig, data: DataConfig, tokenizer: ChatTokenizer, tools: ToolBox, **kwargs: Any) -> None:
        """Once in each process, before the first session: what all sessions share, and what should fail before training starts.
        ``kwargs`` are those of the loop's entry in ``rollout.agent.agent_loop_config_path``."""

    @classmethod
    async def close_class(cls) -> None:
        """Once at the end of the process: undo ``init_class``, and whatever sessions have begun to share."""

    def partial(self) -> AgentLoopOutput | None:
        """What the session has when it runs into its deadline, for ``rollout.keep_truncated``; None: nothing worth training."""
        return None

    @abc.abstractmethod
    async def run(self, sampling: SamplingParams, **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """The session's rows; an empty list means that it produced none. ``sampling.max_tokens`` is the response budget of the session."""

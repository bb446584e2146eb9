"""What one session cost and how it went: sums and counts only, made by the agent loop, added up by telemetry."""

from __future__ import annotations

from collections import Counter

import msgspec

from streamrl.telemetry.metrics import Metrics


class ToolTime(msgspec.Struct):
    """Calls of one tool in one session."""

    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    seconds: list[float] = []


class SessionMetrics(msgspec.Struct):
    """Zero everywhere means that nothing of the kind happened; ``num_preempted`` -1 that the engine does not say."""

    generate_s: float = 0.0
    tool_s: float = 0.0
    interaction_s: float = 0.0
    reward_s: float = 0.0
    num_calls: int = 0  # of the engine
    num_preempted: int = -1
    tools: dict[str, ToolTime] = {}
    observation_tokens: int = 0
    dropped_observation_tokens: int = 0  # of observations that did not fit
    parse_errors: int = 0  # calls that were recognised but not well formed
    context_resets: int = 0  # rows that were begun because the agent changed its history

    def tool_outcomes(self) -> dict[str, int]:
        """Calls of all tools by outcome."""
        total: Counter[str] = sum((tool.outcomes for tool in self.tools.values()), Counter())
        return dict(total)

    def report(self, metrics: Metrics) -> None:
        """Into the counters of the rollout process; most sessions have most of it not at all."""
        if self.observation_tokens:
            metrics.inc("streamrl_rollout_tokens_total", self.observation_tokens, kind="tool")
        if self.parse_errors:
            metrics.inc("streamrl_tool_parse_errors_total", self.parse_errors)
        if self.context_resets:
            metrics.inc("streamrl_rollout_context_resets_total", self.context_resets)
        if self.dropped_observation_tokens:
            metrics.inc("streamrl_rollout_dropped_observation_tokens_total", self.dropped_observation_tokens)
        for kind in ("generate", "tool", "interaction", "reward"):
            if seconds := getattr(self, f"{kind}_s"):
                metrics.inc("streamrl_rollout_session_phase_seconds_total", seconds, phase=kind)
        for name, tool in self.tools.items():
            for outcome, count in tool.outcomes.items():
                metrics.inc("streamrl_tool_calls_total", count, tool=name, outcome=outcome)
            for seconds in tool.seconds:
                metrics.observe("streamrl_tool_call_seconds", seconds, tool=name)

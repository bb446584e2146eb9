"""An agent loop and a score function that make a small run waste tokens in every way there is."""

from __future__ import annotations

import asyncio
from typing import Any

from streamrl.protocol.generate import SamplingParams
from streamrl.rollout import AgentLoopOutput
from streamrl.rollout.single_turn import SingleTurnAgentLoop

SLOW_S = 2.5  # longer than two steps: its group grows too old


class MixedLoop(SingleTurnAgentLoop):
    """Asks once; of ten answers one is thrown away, and of forty prompts one takes too long. Otherwise as the plain loop, after a moment of tool time."""

    async def run(self, sampling: SamplingParams, **row: Any) -> AgentLoopOutput:
        output = await super().run(sampling, **row)
        await asyncio.sleep(0.002)
        draw = sum(output.prompt_ids) * 7
        if draw % 40 == 0 and "-1-0-" in self.request_id:
            await asyncio.sleep(SLOW_S)
        if sum(output.response_ids) % 10 == 0:
            raise RuntimeError("this answer is lost")
        return output


def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """The same for all answers to some prompts, so that they have no signal."""
    if len(str(ground_truth)) == 2 and str(ground_truth)[1] in "02468":
        return 0.0
    return sum(character.isdigit() for character in solution_str) / max(len(solution_str), 1) - 0.25


score.inline = True  # type: ignore[attr-defined]

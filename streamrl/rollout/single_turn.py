"""The simplest agent loop: one prompt, one answer."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from streamrl.config.tools import row_tools
from streamrl.protocol.chat import prompt_ids
from streamrl.protocol.generate import GenerateRequest, SamplingParams
from streamrl.rollout.base import AgentLoopBase, AgentLoopOutput
from streamrl.rollout.chat import fit_prompt
from streamrl.rollout.registry import register_agent_loop
from streamrl.rollout.sampling import call_budget


@register_agent_loop("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """Template, one generation, cut to the budget. Every response token is the model's, so the mask is all ones."""

    async def run(self, sampling: SamplingParams, **row: Any) -> AgentLoopOutput:
        tools = row_tools(self.data, row.get("extra_info"))
        ids = prompt_ids(self.tokenizer, row["raw_prompt"], self.data.apply_chat_template_kwargs, tools)
        ids = fit_prompt(ids, self.data.max_prompt_length, self.rollout.overlong_prompt)
        budget = call_budget(self.data, prompt_len=len(ids), used=0, asked=sampling.max_tokens)
        result = await self.generate(GenerateRequest(self.request_id, ids, replace(sampling, max_tokens=budget)))
        return AgentLoopOutput(
            prompt_ids=ids,
            response_ids=result.token_ids[:budget],
            response_mask=[1] * len(result.token_ids[:budget]),
            response_logprobs=result.log_probs[:budget] if self.rollout.calculate_log_probs else None,
            rollout_versions=result.versions[:budget],
            stop_reason=result.stop_reason if len(result.token_ids) <= budget else "length",
        )

"""The synchronous oracle: classic DataProto flow, straight down, in one process. What ``max_staleness = 0`` must reproduce.

    P prompts ► repeat(n) ► generate ► union ► old log-probs ► scores ► advantages ► update ► weights to the engine ► next step

Shares only ``algorithms/``, the scorers, the prompt stream and the model with the pipeline: no loop, no store, no replay buffer, no FSDP,
no micro-batches. Widths are fixed: prompts left-padded to ``max_prompt_length`` (MP), responses right-padded to ``max_response_length``
(MR); input_ids, attention_mask and position_ids are [B, MP + MR]. One mini-batch a step unless ``ppo_mini_batch_size`` says otherwise.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM

from streamrl.algorithms import advantages, corrections, losses
from streamrl.config import Config
from streamrl.config.tools import row_tools
from streamrl.pipeline.build import build_prompts, run_seed
from streamrl.protocol import DataProto
from streamrl.protocol.generate import GenerateRequest, GenerateResult, SamplingParams
from streamrl.protocol.interfaces import Engine
from streamrl.protocol.keys import request_seed
from streamrl.protocol.trajectory import Prompt
from streamrl.rewards import build as build_scorer
from streamrl.rollout import load_tokenizer
from streamrl.weights.snapshot import write_snapshot


@dataclass(frozen=True)
class ReferenceStep:
    """What one step did. Rows are in (prompt, session) order."""

    uids: list[str]  # [P * n]
    responses: list[list[int]]  # [P * n] of R_i token ids
    advantages: Tensor  # [P * n, MR]
    old_log_probs: Tensor  # [P * n, MR]
    loss: float
    grad_norm: float


class SyncReference:
    """Runs ``steps`` one after another on ``engine``; ``model`` holds the float32 weights."""

    def __init__(self, config: Config, engine: Engine, weights_dir: Path) -> None:
        self.config = config
        self.engine = engine
        self.weights_dir = weights_dir
        self.prompts = build_prompts(config)
        self.tokenizer = load_tokenizer(config.model)
        self.scorer = build_scorer(config.reward, config.data)
        self.model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
        optim = config.actor.optim
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay)
        self.version = 0

    async def run(self, steps: int) -> list[ReferenceStep]:
        await self._hand_over()
        return [await self.step() for _ in range(steps)]

    async def step(self) -> ReferenceStep:
        """One batch of ``train_batch_size`` prompts, from rows to new weights in the engine."""
        batch = prompt_batch(await self.prompts.next_prompts(self.config.data.train_batch_size))
        batch = batch.repeat(repeat_times=self.config.rollout.n, interleave=True)
        batch.union(await self._generate(batch))
        with torch.no_grad():
            batch.union(DataProto.from_dict(tensors={"old_log_probs": self._log_probs(batch)}))
        batch.union(await self._scores(batch))
        batch.union(self._advantages(batch))
        loss, grad_norm = self._update(batch)
        self.version += 1
        await self._hand_over()
        mask = tensors_of(batch)["response_mask"].bool()
        responses = [ids[kept].tolist() for ids, kept in zip(tensors_of(batch)["responses"], mask, strict=True)]
        return ReferenceStep(
            list(batch.non_tensor_batch["uid"]), responses, tensors_of(batch)["advantages"], tensors_of(batch)["old_log_probs"], loss, grad_norm
        )

    async def _generate(self, batch: DataProto) -> DataProto:
        """Columns of the answers: row i is session i % n of its prompt."""
        uids, n = batch.non_tensor_batch["uid"], self.config.rollout.n
        columns = batch.non_tensor_batch
        prompts = [self._prompt_ids(messages, extra_info) for messages, extra_info in zip(columns["raw_prompt"], columns["extra_info"], strict=True)]
        results = await asyncio.gather(*(self._answer(uids[i], i % n, prompts[i]) for i in range(len(uids))))
        return padded_batch(prompts, results, self.config.data.max_prompt_length, self.config.data.max_response_length)

    def _prompt_ids(self, messages: list[dict[str, Any]], extra_info: dict[str, Any]) -> list[int]:
        kwargs, tools = self.config.data.apply_chat_template_kwargs, row_tools(self.config.data.tool_config_path, extra_info)
        return list(self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False, **kwargs))

    async def _answer(self, uid: str, session_id: int, prompt_ids: list[int]) -> GenerateResult:
        rollout = self.config.rollout
        sampling = SamplingParams(
            max_tokens=self.config.data.max_response_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            repetition_penalty=rollout.repetition_penalty,
            seed=request_seed(run_seed(self.config), uid, session_id, 0),
        )
        return await self.engine.generate(GenerateRequest(f"{uid}-{session_id}", prompt_ids, sampling))

    def _log_probs(self, batch: DataProto) -> Tensor:
        """Log-probs [B, MR] of the response tokens: the output at t - 1 scores token t, at the sampling temperature."""
        columns = tensors_of(batch)
        width = columns["responses"].shape[1]
        out = self.model(input_ids=columns["input_ids"], attention_mask=columns["attention_mask"], position_ids=columns["position_ids"])
        logits = out.logits[:, -width - 1 : -1].float() / self.config.rollout.temperature
        return logits.log_softmax(-1).gather(-1, columns["responses"].unsqueeze(-1)).squeeze(-1)

    async def _scores(self, batch: DataProto) -> DataProto:
        """Outcome scores on the last token of each answer."""
        scores = torch.zeros_like(tensors_of(batch)["rollout_log_probs"])
        for i, kept in enumerate(tensors_of(batch)["response_mask"].bool()):
            row = {name: column[i] for name, column in batch.non_tensor_batch.items()}
            text = self.tokenizer.decode(tensors_of(batch)["responses"][i][kept], skip_special_tokens=True)
            score, _ = await self.scorer.score(row, text, dict(row.get("extra_info") or {}))
            scores[i, int(kept.nonzero()[-1])] = score
        return DataProto.from_dict(tensors={"token_level_scores": scores, "token_level_rewards": scores})

    def _advantages(self, batch: DataProto) -> DataProto:
        columns, algorithm = tensors_of(batch), self.config.algorithm
        mask = columns["response_mask"]
        weights, _, _ = corrections.rollout_correction(columns["old_log_probs"], columns["rollout_log_probs"], mask, algorithm.rollout_correction)
        estimate = advantages.get(algorithm.adv_estimator)
        values, returns = estimate(columns["token_level_rewards"], mask, index=batch.non_tensor_batch["uid"], config=algorithm)
        tensors = {"advantages": values, "returns": returns}
        return DataProto.from_dict(tensors=tensors if weights is None else tensors | {"rollout_is_weights": weights})

    def _update(self, batch: DataProto) -> tuple[float, float]:
        """Epochs over mini-batches of whole groups; loss and gradient norm of the last optimizer step."""
        actor, n = self.config.actor, self.config.rollout.n
        loss_of, norm = losses.get(actor.policy_loss.loss_mode), 0.0
        loss = torch.zeros(())
        for _ in range(actor.ppo_epochs):
            for part in batch.split(actor.ppo_mini_batch_size * n):
                columns = tensors_of(part)
                loss, _ = loss_of(
                    columns["old_log_probs"],
                    self._log_probs(part),
                    columns["advantages"],
                    columns["response_mask"],
                    loss_agg_mode=actor.loss_agg_mode,
                    config=actor,
                    rollout_is_weights=columns.get("rollout_is_weights"),
                )
                loss.backward()
                norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), actor.grad_clip))
                self.optimizer.step()
                self.optimizer.zero_grad()
        return float(loss.detach()), norm

    async def _hand_over(self) -> None:
        dtype = getattr(torch, self.config.rollout.dtype)
        manifest = write_snapshot(self.version, self.model.state_dict().items(), self.weights_dir, dtype=dtype)
        await self.engine.update_weights(manifest)


def tensors_of(data: DataProto) -> TensorDict:
    """The tensor columns; every batch here has some."""
    assert data.batch is not None
    return data.batch


def prompt_batch(prompts: list[Prompt]) -> DataProto:
    """P prompts as a DataProto: one object column per dataset column, and the uid."""
    names = sorted(set.union(*(set(prompt.row) for prompt in prompts)) - {"uid"})
    columns: dict[str, Any] = {name: object_column([prompt.row.get(name) for prompt in prompts]) for name in names}
    columns["uid"] = object_column([prompt.uid for prompt in prompts])
    columns["dummy_tensor"] = torch.zeros((len(prompts), 1), dtype=torch.uint8)
    return DataProto.from_single_dict(columns)


def object_column(values: list[Any]) -> np.ndarray:
    """One element per row, also when the values are lists of one length."""
    column = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        column[i] = value
    return column


def padded_batch(prompts: list[list[int]], results: list[GenerateResult], max_prompt: int, max_response: int, pad_id: int = 0) -> DataProto:
    """Left-padded prompts and right-padded answers as columns [B, MP], [B, MR] and [B, MP + MR]."""
    rows = len(prompts)
    columns = {
        "prompts": torch.full((rows, max_prompt), pad_id),
        "responses": torch.full((rows, max_response), pad_id),
        "response_mask": torch.zeros(rows, max_response, dtype=torch.int64),
        "rollout_log_probs": torch.zeros(rows, max_response),
    }
    attention = torch.zeros(rows, max_prompt + max_response, dtype=torch.int64)
    for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        size = len(result.token_ids)
        columns["prompts"][i, max_prompt - len(prompt) :] = torch.tensor(prompt)
        columns["responses"][i, :size] = torch.tensor(result.token_ids)
        columns["response_mask"][i, :size] = 1
        columns["rollout_log_probs"][i, :size] = torch.tensor(result.log_probs)
        attention[i, max_prompt - len(prompt) : max_prompt + size] = 1
    columns["input_ids"] = torch.cat([columns["prompts"], columns["responses"]], dim=1)
    columns["attention_mask"] = attention
    columns["position_ids"] = (attention.cumsum(1) - 1).clamp(min=0)
    return DataProto.from_dict(tensors=columns)

"""The synchronous oracle: classic DataProto flow, straight down, in one process. What ``max_staleness = 0`` must reproduce.

    P prompts ► repeat(n) ► generate ► union ► old (and reference) log-probs, values ► scores ► advantages ► updates ► weights to the engine ► next step

Shares only ``algorithms/``, the scorers, the prompt stream and the model (with its adapters) with the pipeline: no loop, no store, no replay buffer,
no FSDP, no micro-batches. Widths are fixed: prompts left-padded to ``max_prompt_length`` (MP), responses right-padded to ``max_response_length`` (MR);
input_ids, attention_mask and position_ids are [B, MP + MR]. One mini-batch a step unless ``ppo_mini_batch_size`` says otherwise. Knows every
estimator but gdpo and every loss (clip_cov draws other tokens than the learner does), KL, entropy and correction; a session has one
output. Adapters are handed over without the record that an engine with a model asks for: they take the scripted one.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from streamrl.algorithms import advantages, corrections, kl, losses
from streamrl.algorithms.kl_control import kl_controller
from streamrl.config import Config
from streamrl.config.losses import agg_mode
from streamrl.config.objective import acting_loss, needed_columns, uses_critic, uses_reference
from streamrl.config.tools import row_tools
from streamrl.learner.lora import attach
from streamrl.pipeline.build import build_prompts, run_seed
from streamrl.pipeline.reference_batch import padded_batch, prompt_batch, tensors_of
from streamrl.pipeline.reference_critic import ReferenceCritic
from streamrl.protocol import DataProto
from streamrl.protocol.answer import Answer
from streamrl.protocol.generate import GenerateRequest, GenerateResult
from streamrl.protocol.interfaces import Engine
from streamrl.protocol.keys import request_seed
from streamrl.rewards import build as build_rewards
from streamrl.rollout import load_tokenizer
from streamrl.rollout.sampling import greedy_sampling, training_sampling
from streamrl.weights.snapshot import write_snapshot


@dataclass(frozen=True)
class ReferenceStep:
    """What one step did. Rows are in (prompt, session) order."""

    uids: list[str]  # [P * n]
    responses: list[list[int]]  # [P * n] of R_i token ids
    advantages: Tensor  # [P * n, MR]
    old_log_probs: Tensor  # [P * n, MR]
    loss: float  # 0, like the next, in a step that trains the critic alone
    grad_norm: float
    value_loss: float | None  # None: no critic


class SyncReference:
    """Runs ``steps`` one after another on ``engine``; ``model`` holds the float32 weights."""

    def __init__(self, config: Config, engine: Engine, weights_dir: Path) -> None:
        self.config = config
        self.engine = engine
        self.weights_dir = weights_dir
        self.prompts = build_prompts(config)
        self.tokenizer = load_tokenizer(config.model)
        self.rewards = build_rewards(config.reward, config.data)
        self.model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
        self.reference = copy.deepcopy(self.model) if uses_reference(config.algorithm, config.actor) else None
        attach(self.model, config.model, run_seed(config), torch.float32)
        optim, trained = config.actor.optim, [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay)
        self.controller = kl_controller(config.algorithm.kl_ctrl)
        self.critic = ReferenceCritic(config) if uses_critic(config) else None
        self.version = self.steps = 0

    async def run(self, steps: int) -> list[ReferenceStep]:
        await self._hand_over()
        return [await self.step() for _ in range(steps)]

    async def step(self) -> ReferenceStep:
        """One batch of ``train_batch_size`` prompts, from rows to new weights in the engine."""
        batch = prompt_batch(await self.prompts.next_prompts(self.config.data.train_batch_size))
        batch = batch.repeat(repeat_times=self.config.rollout.n, interleave=True)
        batch.union(await self._generate(batch))
        batch.union(self._scored(batch))
        batch.union(await self._scores(batch))
        if "reward_baselines" in needed_columns(self.config.algorithm.adv_estimator):
            batch.union(await self._greedy_scores(batch))
        if self.critic is not None:
            batch.union(self.critic.valued(batch))
        batch.union(self._advantages(batch))
        value_loss = None if self.critic is None else self.critic.update(batch)
        self.steps += 1
        loss, grad_norm = 0.0, 0.0
        if self.steps > self.config.trainer.critic_warmup:
            loss, grad_norm = self._update(batch)
            self.version += 1
            await self._hand_over()
        mask = tensors_of(batch)["response_mask"].bool()
        responses = [ids[kept].tolist() for ids, kept in zip(tensors_of(batch)["responses"], mask, strict=True)]
        return ReferenceStep(
            list(batch.non_tensor_batch["uid"]), responses, tensors_of(batch)["advantages"], tensors_of(batch)["old_log_probs"], loss, grad_norm, value_loss
        )

    async def _generate(self, batch: DataProto) -> DataProto:
        """Columns of the answers: row i is session i % n of its prompt."""
        uids, n = batch.non_tensor_batch["uid"], self.config.rollout.n
        columns = batch.non_tensor_batch
        prompts = [self._prompt_ids(messages, extra_info) for messages, extra_info in zip(columns["raw_prompt"], columns["extra_info"], strict=True)]
        results = await asyncio.gather(*(self._answer(uids[i], i % n, prompts[i]) for i in range(len(uids))))
        return padded_batch(prompts, results, self.config.data.max_prompt_length, self.config.data.max_response_length)

    def _prompt_ids(self, messages: list[dict[str, Any]], extra_info: dict[str, Any]) -> list[int]:
        kwargs, tools = self.config.data.apply_chat_template_kwargs, row_tools(self.config.data, extra_info)
        return list(self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False, **kwargs))

    async def _answer(self, uid: str, session_id: int, prompt_ids: list[int]) -> GenerateResult:
        sampling = training_sampling(self.config.rollout, self.config.data, request_seed(run_seed(self.config), uid, session_id, 0))
        return await self.engine.generate(GenerateRequest(f"{uid}-{session_id}", prompt_ids, sampling))

    async def _greedy_scores(self, batch: DataProto) -> DataProto:
        """The score of one greedy answer per prompt, on all its rows."""
        scores: dict[str, float] = {}
        for i, uid in enumerate(batch.non_tensor_batch["uid"]):
            if uid not in scores:
                row = {name: column[i] for name, column in batch.non_tensor_batch.items()}
                sampling = greedy_sampling(self.config.rollout, self.config.data, 0)
                prompt_ids = self._prompt_ids(row["raw_prompt"], row["extra_info"])
                answer = await self.engine.generate(GenerateRequest(f"{uid}-greedy", prompt_ids, sampling))
                scores[uid] = await self._score_text(row, answer.token_ids)
        return DataProto.from_dict(tensors={"reward_baselines": torch.tensor([scores[uid] for uid in batch.non_tensor_batch["uid"]])})

    @torch.no_grad()
    def _scored(self, batch: DataProto) -> DataProto:
        """What the policies say of the answers before the update; in bypass mode the engine's word is taken for the old log-probs."""
        scored = self._forward(self.model, batch)
        columns = {"old_log_probs": scored["log_probs"], "sum_pi_squared": scored["sum_pi_squared"]}
        if self.config.algorithm.rollout_correction.bypass_mode:
            columns["old_log_probs"] = tensors_of(batch)["rollout_log_probs"].clone()
        if self.reference is not None:
            columns["ref_log_prob"] = self._forward(self.reference, batch)["log_probs"]
        return DataProto.from_dict(tensors=columns)

    def _forward(self, model: nn.Module, batch: DataProto) -> dict[str, Tensor]:
        """Of the response tokens [B, MR]: the output at t - 1 scores token t, at the sampling temperature."""
        columns = tensors_of(batch)
        width = columns["responses"].shape[1]
        out = model(input_ids=columns["input_ids"], attention_mask=columns["attention_mask"], position_ids=columns["position_ids"])
        log_probs = (out.logits[:, -width - 1 : -1].float() / self.config.rollout.temperature).log_softmax(-1)
        probs = log_probs.exp()
        return {
            "log_probs": log_probs.gather(-1, columns["responses"].unsqueeze(-1)).squeeze(-1),
            "entropy": -(probs * log_probs).sum(-1),
            "sum_pi_squared": probs.square().sum(-1),
        }

    async def _scores(self, batch: DataProto) -> DataProto:
        """Outcome scores on the last token of each answer."""
        scores = torch.zeros_like(tensors_of(batch)["rollout_log_probs"])
        for i, kept in enumerate(tensors_of(batch)["response_mask"].bool()):
            row = {name: column[i] for name, column in batch.non_tensor_batch.items()}
            scores[i, int(kept.nonzero()[-1])] = await self._score_text(row, tensors_of(batch)["responses"][i][kept].tolist())
        return DataProto.from_dict(tensors={"token_level_scores": scores})

    async def _score_text(self, row: dict[str, Any], token_ids: list[int]) -> float:
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return (await self.rewards.score(Answer(row=row, text=text, extra_info=dict(row.get("extra_info") or {}), num_tokens=len(token_ids))))[0]

    def _advantages(self, batch: DataProto) -> DataProto:
        """Correction, KL in the reward, estimator; ``loss_mask`` is what all of them leave."""
        columns, algorithm = tensors_of(batch), self.config.algorithm
        mask, old, scores = columns["response_mask"], columns["old_log_probs"], columns["token_level_scores"]
        weights, accept = None, None
        if not algorithm.rollout_correction.bypass_mode:
            weights, accept, _ = corrections.rollout_correction(old, columns["rollout_log_probs"], mask, algorithm.rollout_correction)
        kept = mask.bool() if accept is None else mask.bool() & accept
        rewards = torch.where(kept.any(1, keepdim=True), scores, 0.0)
        large = self._in_large_groups(batch.non_tensor_batch["uid"], kept)[:, None]
        kept = kept & large
        if algorithm.use_kl_in_reward:
            rewards, divergence, rows = kl.kl_in_reward(rewards, old, columns["ref_log_prob"], kept, beta=self.controller.beta, kind=algorithm.kl_penalty)
            self.controller.update(divergence, rows)
        names = ("old_log_probs", "sum_pi_squared", "reward_baselines", "token_level_scores", "values")
        known = {name: columns[name] for name in names if name in columns.keys()}
        if weights is not None:
            known["rollout_is_weights"] = weights
        estimate = advantages.get(algorithm.adv_estimator)
        values, returns = estimate(rewards, mask * large, index=batch.non_tensor_batch["uid"], config=algorithm, accept=kept, **known)
        tensors = {"token_level_rewards": rewards, "advantages": torch.where(kept, values, 0.0), "returns": returns, "loss_mask": kept.long()}
        return DataProto.from_dict(tensors=tensors if weights is None else tensors | {"rollout_is_weights": weights})

    def _in_large_groups(self, uids: np.ndarray, kept: Tensor) -> Tensor:
        """bool [B]: rows of a group with enough accepted samples."""
        accepted = Counter(uid for uid, counts in zip(uids, kept.any(1).tolist(), strict=True) if counts)
        return torch.tensor([accepted[uid] >= (self.config.algorithm.min_group_size or 1) for uid in uids])

    def _update(self, batch: DataProto) -> tuple[float, float]:
        """Epochs over mini-batches of whole groups; policy loss and gradient norm of the last optimizer step."""
        actor, n = self.config.actor, self.config.rollout.n
        norm, loss = 0.0, torch.zeros(())
        for _ in range(actor.ppo_epochs):
            for part in batch.split(actor.ppo_mini_batch_size * n):
                loss, penalties = self._loss(part)
                (loss + penalties).backward()
                norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), actor.grad_clip))
                self.optimizer.step()
                self.optimizer.zero_grad()
        return float(loss.detach()), norm

    def _loss(self, part: DataProto) -> tuple[Tensor, Tensor]:
        """(policy loss, KL loss minus entropy bonus) of one mini-batch, normalised by its own counts."""
        actor, columns, scored = self.config.actor, tensors_of(part), self._forward(self.model, part)
        name, mode = acting_loss(self.config.algorithm, actor), agg_mode(actor)
        options: dict[str, Any] = {"correction": self.config.algorithm.rollout_correction} if name == "bypass_mode" else {}
        mask, scale = columns["loss_mask"], float(self.config.data.max_response_length)
        loss, _ = losses.get(name)(
            columns["old_log_probs"],
            scored["log_probs"],
            columns["advantages"],
            mask,
            loss_agg_mode=mode,
            config=actor,
            rollout_is_weights=columns.get("rollout_is_weights"),
            loss_scale_factor=scale,
            **options,
        )
        penalties = torch.zeros(())
        if actor.use_kl_loss:
            penalty, _ = kl.kl_loss(scored["log_probs"], columns["ref_log_prob"], mask, actor.kl_loss_type, mode, loss_scale_factor=scale)
            penalties = penalties + actor.kl_loss_coef * penalty
        if actor.entropy_coeff:
            penalties = penalties - actor.entropy_coeff * losses.agg_loss(scored["entropy"], mask, mode, loss_scale_factor=scale)
        return loss, penalties

    async def _hand_over(self) -> None:
        dtype = getattr(torch, self.config.rollout.dtype)
        manifest = write_snapshot(self.version, self.model.state_dict().items(), self.weights_dir, dtype=dtype)
        await self.engine.update_weights(manifest)

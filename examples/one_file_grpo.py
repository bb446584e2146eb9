"""GRPO on one page: streamrl's parts in the open, in one process, one after another.

    prompts ► n answers each ► scores ► group-relative advantages ► clipped update ► weights to the engine ► next step

    python examples/one_file_grpo.py                                  # the shipped tiny model on a CPU
    python examples/one_file_grpo.py trainer.total_training_steps=60 rollout.n=16

Every step waits for the one before, so all samples are fresh. Left out, since the pipeline exists for it: queues, leases and staleness, shared
memory, FSDP, micro-batches, checkpoints, overlong prompts. No KL term and no entropy bonus: the tiny task needs neither.

Shapes: B answers (prompts times n, the answers of a prompt side by side), L tokens of prompt and answer, T = L - 1 positions that predict one.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from streamrl import engines, rewards
from streamrl.algorithms import advantages, corrections, losses
from streamrl.config import Config
from streamrl.config.checks import check
from streamrl.config.load import load, resolve
from streamrl.data import PromptStream
from streamrl.protocol.generate import GenerateRequest, GenerateResult, SamplingParams
from streamrl.protocol.interfaces import Engine
from streamrl.rewards import Answer, RewardManager
from streamrl.rollout import load_tokenizer
from streamrl.weights.snapshot import write_snapshot

TINY = Path(__file__).resolve().parents[1] / "configs" / "tiny_cpu.yaml"
SMALLER = ["data.train_batch_size=16", "actor.ppo_mini_batch_size=16", "trainer.total_training_steps=25"]


async def train(config: Config, folder: Path) -> list[float]:
    """Mean score of every step. ``folder`` is where the weights pass from the policy to the engine."""
    prompts = PromptStream(config.data, run_seed=config.run.seed or 0, total_epochs=None)
    tokenizer = load_tokenizer(config.model)
    scorer = rewards.build(config.reward, config.data)
    policy = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)  # comes in eval mode: no dropout
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.actor.optim.lr, weight_decay=config.actor.optim.weight_decay)
    max_tokens = config.data.max_prompt_length + config.data.max_response_length
    engine = engines.create(config.model, config.rollout, name="engine", max_model_len=max_tokens, seed=config.run.seed or 0)
    await engine.start()
    history: list[float] = []
    try:
        for step in range(1, (config.trainer.total_training_steps or 1) + 1):
            started = time.perf_counter()
            batch = await prompts.next_prompts(config.data.train_batch_size)
            rows = [prompt.row for prompt in batch for _ in range(config.rollout.n)]
            uids = [prompt.uid for prompt in batch for _ in range(config.rollout.n)]
            prompt_ids = [tokenizer.apply_chat_template(row["raw_prompt"], add_generation_prompt=True, return_dict=False) for row in rows]

            answers = await generate(engine, prompt_ids, config)
            scores = await score(scorer, rows, answers, tokenizer)
            columns = collate(prompt_ids, answers, scores)
            loss = update(policy, optimizer, columns, uids, config)
            manifest = write_snapshot(step, policy.state_dict().items(), folder, dtype=getattr(torch, config.rollout.dtype))
            await engine.update_weights(manifest)  # loads, and compares the hash of every tensor
            Path(manifest.path).unlink()

            history.append(sum(scores) / len(scores))
            print(f"step {step}  reward {history[-1]:.3f}  loss {loss:+.4f}  {len(rows)} answers in {time.perf_counter() - started:.1f} s", flush=True)
    finally:
        await engine.stop()
        await scorer.close()
    return history


async def generate(engine: Engine, prompt_ids: list[list[int]], config: Config) -> list[GenerateResult]:
    """One answer to each prompt, all at once: token ids in, token ids and their log-probs out."""
    rollout = config.rollout
    sampling = SamplingParams(max_tokens=config.data.max_response_length, temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k)
    return await asyncio.gather(*(engine.generate(GenerateRequest(str(i), ids, sampling)) for i, ids in enumerate(prompt_ids)))


async def score(scorer: RewardManager, rows: list[dict[str, Any]], answers: list[GenerateResult], tokenizer: Any) -> list[float]:
    """The rule of each row's ``data_source`` reads the text; the tokens stay what they were."""
    texts = [tokenizer.decode(answer.token_ids, skip_special_tokens=True) for answer in answers]
    results = await asyncio.gather(*(scorer.score(Answer(row=row, text=text)) for row, text in zip(rows, texts, strict=True)))
    return [value for value, _ in results]


def collate(prompt_ids: list[list[int]], answers: list[GenerateResult], scores: list[float]) -> dict[str, Tensor]:
    """Right-padded columns: ids and attention [B, L]; mask, rollout_log_probs and rewards [B, T], where entry t belongs to token t + 1.

    A prompt of 3 and an answer of 2 tokens in L = 6: mask [0, 0, 1, 1, 0]; the score stands at the answer's last token, here t = 3.
    """
    size_B = [len(prompt) + len(answer.token_ids) for prompt, answer in zip(prompt_ids, answers, strict=True)]
    shape = len(size_B), max(size_B)
    columns = {"ids": torch.zeros(shape, dtype=torch.long), "attention": torch.zeros(shape, dtype=torch.long)}
    columns |= {name: torch.zeros(shape[0], shape[1] - 1) for name in ("mask", "rollout_log_probs", "rewards")}
    for i, (prompt, answer) in enumerate(zip(prompt_ids, answers, strict=True)):
        written = slice(len(prompt) - 1, size_B[i] - 1)  # predicted one position earlier; prompt tokens are not trained
        columns["ids"][i, : size_B[i]] = torch.tensor([*prompt, *answer.token_ids])
        columns["attention"][i, : size_B[i]] = 1
        columns["mask"][i, written] = 1
        columns["rollout_log_probs"][i, written] = torch.tensor(answer.log_probs)
        columns["rewards"][i, size_B[i] - 2] = scores[i]
    return columns


def update(policy: Any, optimizer: torch.optim.Optimizer, columns: dict[str, Tensor], uids: list[str], config: Config) -> float:
    """One optimizer step on the whole batch; its loss. The engine's log-probs differ from the policy's by rounding only, and are corrected for it."""
    temperature, mask = config.rollout.temperature, columns["mask"]
    with torch.no_grad():
        old_log_probs = log_probs(policy, columns, temperature)
    weights, _, _ = corrections.rollout_correction(old_log_probs, columns["rollout_log_probs"], mask, config.algorithm.rollout_correction)
    estimate = advantages.get(config.algorithm.adv_estimator)
    advantage, _ = estimate(columns["rewards"], mask, index=uids, config=config.algorithm)  # compares the answers with one uid
    objective = losses.get(config.actor.policy_loss.loss_mode)
    new_log_probs = log_probs(policy, columns, temperature)
    options = {"loss_agg_mode": config.actor.loss_agg_mode, "config": config.actor, "rollout_is_weights": weights}
    loss, _ = objective(old_log_probs, new_log_probs, advantage, mask, **options)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), config.actor.grad_clip)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def log_probs(policy: Any, columns: dict[str, Tensor], temperature: float) -> Tensor:
    """[B, T]: the log-prob of token t + 1 given the tokens up to t, at the temperature it was sampled with."""
    logits = policy(input_ids=columns["ids"], attention_mask=columns["attention"]).logits[:, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, columns["ids"][:, 1:, None]).squeeze(-1)


def main(words: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"on top of {TINY.name} and {' '.join(SMALLER)}")
    config = load([TINY], [*SMALLER, *parser.parse_args(words).overrides])
    check(config)
    with tempfile.TemporaryDirectory() as folder:
        history = asyncio.run(train(resolve(config), Path(folder)))
    fifth = max(1, len(history) // 5)
    print(f"mean reward of the first and the last {fifth}: {sum(history[:fifth]) / fifth:.3f}, {sum(history[-fifth:]) / fifth:.3f}")
    return history


if __name__ == "__main__":
    main()

"""The learner's update beside bare training loops on the same rows, in one run: ``python -m tests.benchmarks.learner_speed [--repeats 3] [--threads 2]``.

A model of SmolLM2-135M's shape with random weights, float32 unless told otherwise. *Rows*: 64 in 8 groups, prompts of about 54 tokens, answers of 2 to 32;
a bare loop is forward, cross-entropy at the response tokens, backward, clipping and AdamW, right-padded in micro-batches sorted by length, or packed with a
mask. *One group*: 8 answers of 100 tokens to a prompt of 1,000. Ours and the others take turns, so that a busy machine slows both; medians count.

Bars: 0.9 of the fastest bare loop's speed; a shared prompt 3 times as fast as row by row; less than 5 % padding on long-tailed lengths.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from streamrl.config.training import ActorConfig, AlgorithmConfig, LearnerConfig
from streamrl.learner.attention import pack
from streamrl.learner.balance import padded_micro_batches
from streamrl.learner.comm import Comm, Rendezvous
from streamrl.learner.engine import PolicyEngine
from streamrl.learner.loading import Pretrained
from streamrl.learner.objective import Objective
from streamrl.learner.policy_update import PolicyLesson
from streamrl.learner.rows import Column, Rows
from streamrl.learner.update import Update
from streamrl.protocol.learn import UpdateWork
from streamrl.protocol.meta import KVBatchMeta
from tests.benchmarks.protocol_speed import interleaved

SMOLLM2 = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152}
SPEED_BAR, SHARING_BAR, PADDING_BAR = 0.9, 3.0, 0.05

Row = tuple[str, Tensor, Tensor]  # key, prompt, answer


def make_model(**changes: int) -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SMOLLM2, **changes}, tie_word_embeddings=True)).eval()


def make_rows(groups: int, n: int, prompt: tuple[int, int], answer: tuple[int, int], vocabulary: int = SMOLLM2["vocab_size"]) -> list[Row]:
    draw, dice, rows = torch.Generator().manual_seed(0), random.Random(0), []
    for g in range(groups):
        ids = torch.randint(vocabulary, (dice.randint(*prompt),), generator=draw)
        rows += [(f"g{g}_{s}_0", ids, torch.randint(vocabulary, (dice.randint(*answer),), generator=draw)) for s in range(n)]
    return rows


def bare_passes(rows: list[Row], micro_batch: int | None, packed_tokens: int | None) -> Iterator[tuple[dict[str, Tensor], Tensor, Tensor]]:
    """(inputs of the model, places among its flattened tokens that score, labels)."""
    if micro_batch is not None:
        rows = sorted(rows, key=lambda row: -len(row[1]) - len(row[2]))
        for chosen in (rows[start : start + micro_batch] for start in range(0, len(rows), micro_batch)):
            ids = nn.utils.rnn.pad_sequence([torch.cat([prompt, answer]) for _, prompt, answer in chosen], batch_first=True)
            places = torch.cat([i * ids.shape[1] + len(prompt) - 1 + torch.arange(len(answer)) for i, (_, prompt, answer) in enumerate(chosen)])
            yield {"input_ids": ids}, places, ids.flatten()[places + 1]
        return
    packs: list[list[Row]] = [[]]
    for row in rows:
        if sum(len(p) + len(a) for _, p, a in [*packs[-1], row]) > (packed_tokens or 0):
            packs.append([])
        packs[-1].append(row)
    for chosen in filter(None, packs):
        lengths = [len(prompt) + len(answer) for _, prompt, answer in chosen]
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        ids = torch.cat([torch.cat([prompt, answer]) for _, prompt, answer in chosen])
        places = torch.cat([start + len(p) - 1 + torch.arange(len(a)) for start, (_, p, a) in zip(starts, chosen, strict=True)])
        yield {"input_ids": ids[None], "position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}, places, ids[places + 1]


def bare_step(model: Any, rows: list[Row], dtype: str, *, micro_batch: int | None = None, packed_tokens: int | None = None) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    tokens = sum(len(answer) for *_, answer in rows)

    def step() -> None:
        for inputs, places, labels in bare_passes(rows, micro_batch, packed_tokens):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
                logits = model.lm_head(model.model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)[places])
            (cross_entropy(logits.float(), labels, reduction="sum") / tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def our_step(model: nn.Module, rows: list[Row], dtype: str, comm: Comm, *, packed: bool | None = None, shared: bool = True) -> Callable[[], int]:
    """An update of the learner; returns the tokens that it computed."""
    pack(model, packed)
    actor = ActorConfig(ppo_mini_batch_size=len(rows))
    engine = PolicyEngine(Pretrained(model, tensors={}), actor, LearnerConfig(dtype=dtype, shared_prompts=shared), comm, 1.0)  # type: ignore[arg-type]
    update = Update(engine, PolicyLesson(engine, actor, Objective(actor, AlgorithmConfig(), None), seed=0), max_consecutive_skips=3)
    keys, sizes = [key for key, *_ in rows], [len(answer) for *_, answer in rows]
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    ids = Column(torch.cat([torch.cat(row[1:]) for row in rows]), torch.tensor([0, *(len(p) + len(a) for _, p, a in rows)]).cumsum(0))
    ones = torch.ones(sum(sizes))
    columns = {"loss_mask": ones.long(), "old_log_probs": -10.8 * ones, "advantages": torch.randn(len(ones)), "rollout_is_weights": ones}
    columns_of = {name: Column(values, offsets) for name, values in columns.items()}
    work = UpdateWork(KVBatchMeta("train", keys, [{} for _ in keys]), [keys], 1, 10)
    return lambda: update.run(Rows(keys, ids, columns_of, torch.ones(len(keys), dtype=torch.float64)), work).computed_tokens


def one_rank() -> Comm:
    meeting = Rendezvous("127.0.0.1", 1)
    return Comm.join(0, 1, torch.device("cpu"), rendezvous=meeting.address, held=meeting, timeout_s=60)


def padding_share(seed: int = 0) -> float:
    """Of right-padded micro-batches, log-normal lengths; packed rows have none."""
    dice = random.Random(seed)
    lengths = [min(8000, 20 + int(dice.lognormvariate(5.5, 1.2))) for _ in range(512)]
    parts = padded_micro_batches(lengths, max_tokens=16384)
    return 1 - sum(lengths) / sum(len(part) * max(lengths[i] for i in part) for part in parts)


def medians(calls: dict[str, Callable[[], Any]], repeats: int, real_tokens: int) -> dict[str, float]:
    found = {name: statistics.median(times) for name, times in interleaved(calls, repeats).items()}
    for name, seconds in found.items():
        print(f"  {name:<34}{seconds:8.2f} s{real_tokens / seconds:10.0f} tokens/s")
    return found


def sharing(comm: Comm, repeats: int, dtype: str, **changes: int) -> float:
    """How many times as fast 8 rows of one long prompt are when they share it."""
    rows = make_rows(1, 8, (1000, 1000), (100, 100), changes.get("vocab_size", SMOLLM2["vocab_size"]))
    calls: dict[str, Callable[[], Any]] = {
        "shared prompt": our_step(make_model(**changes), rows, dtype, comm),
        "row by row": our_step(make_model(**changes), rows, dtype, comm, shared=False),
    }
    found = medians(calls, repeats, 8 * 1100)
    return found["row by row"] / found["shared prompt"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--part", choices=["rows", "group", "padding"], action="append")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    parts, comm = args.part or ["rows", "group", "padding"], one_rank()
    if "rows" in parts:
        rows, model = make_rows(8, 8, (50, 58), (2, 32)), make_model()
        bare = {f"bare, padded, {size} rows": bare_step(model, rows, args.dtype, micro_batch=size) for size in (8, 16, 64)}
        bare["bare, packed with a mask"] = bare_step(model, rows, args.dtype, packed_tokens=1024)
        ours = {
            "learner, shared prompts": our_step(make_model(), rows, args.dtype, comm),
            "learner, packed": our_step(make_model(), rows, args.dtype, comm, shared=False),
        }
        print(f"64 rows of 8 prompts, {args.dtype}, {args.threads} threads")
        found = medians({**bare, **ours}, args.repeats, sum(len(p) + len(a) for _, p, a in rows))
        fastest = min(found[name] for name in bare)
        for name in ours:
            print(f"  {name}: {fastest / found[name]:.2f} of the fastest bare loop's speed, bar {SPEED_BAR}")
    if "group" in parts:
        print("8 answers of 100 tokens to a prompt of 1,000")
        print(f"  shared: {sharing(comm, args.repeats, args.dtype):.2f} times as fast, bar {SHARING_BAR}")
    if "padding" in parts:
        print(f"padding on long-tailed lengths: right-padded {padding_share():.1%}, packed 0.0%; bar {PADDING_BAR:.0%}")
    comm.leave()


if __name__ == "__main__":
    main()

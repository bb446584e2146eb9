"""Two prompts, three answers each: one batch on its way from the file to the optimizer step, printed stage by stage.

    python examples/one_batch.py

Everything is real but the model: a tokenizer of one id per character and an engine that gives fixed answers make every length and offset easy
to check. `docs/data.md` explains the stages and contains this script's output.

Prompts A (4 tokens) and B (6); answers A: 3, 5, 4 and B: 2, 4, 6 tokens; rewards A: 1, 0, 0.5 and B: 0, 0, 1.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from streamrl.config.data import DataConfig
from streamrl.config.rollout import DataplaneConfig, RolloutConfig
from streamrl.config.training import ActorConfig, AlgorithmConfig
from streamrl.data import PromptLoader, PromptStream, RLHFDataset
from streamrl.dataplane import Store, StoreIndex
from streamrl.learner.judge import Judgement, judge
from streamrl.learner.plan import plan_shares, plan_update
from streamrl.protocol import DataProto, KVBatchMeta
from streamrl.protocol import tensors as T
from streamrl.protocol.answer import Answer
from streamrl.protocol.fields import trajectory_tag
from streamrl.protocol.groups import GroupLease
from streamrl.protocol.trajectory import Trajectory
from streamrl.rollout import GroupSessionRunner
from streamrl.testing import CharTokenizer, FixedAnswers

PROMPTS = {"A": "ab", "B": "abcd"}  # the template adds a token at either end
ANSWERS = {"A": ["1.", "0...", "5.."], "B": ["0", "0..", "1...."]}  # the engine adds the end token
REWARDS = {"0": 0.0, "5": 0.5, "1": 1.0}  # by an answer's first character
ACTOR = ActorConfig(ppo_mini_batch_size=2, ppo_epochs=2)
RANKS = 2


class FirstCharacter:
    """The scorer."""

    async def start(self) -> None:
        """Nothing to begin."""

    def check(self) -> None:
        """Nothing can break."""

    def child_pids(self) -> list[int]:
        return []

    def serves(self, row: dict[str, Any]) -> bool:
        return True

    def scores_later(self, row: dict[str, Any]) -> bool:
        return False

    async def score(self, answer: Answer) -> tuple[float, dict[str, Any]]:
        score = REWARDS[answer.text[0]]
        return score, {"score": score, "acc": score}

    async def close(self) -> None:
        """Nothing to end."""


@dataclass
class Walk:
    """What each stage made of the batch."""

    collated: dict[str, Any]
    trajectories: list[Trajectory]
    meta: KVBatchMeta
    stored: TensorDict  # as it comes back from the store
    padded: DataProto
    judged: Judgement
    returned: TensorDict  # with the advantage stage's columns, read back


def walk(folder: Path, answers: dict[str, list[str]] = ANSWERS, order: Sequence[int] | None = None, extra: dict[str, Any] | None = None) -> Walk:
    """All stages. ``order`` permutes the rows when they are taken; ``extra`` columns (by key order) are written to the store beside them."""
    data = DataConfig(train_files=str(write_rows(folder, answers)), max_prompt_length=8, max_response_length=8, shuffle=False)
    collated = next(iter(PromptLoader(RLHFDataset(data.train_files, data), batch_size=len(answers), shuffle=False, seed=0)))
    trajectories = asyncio.run(roll_out(data, answers))
    index = StoreIndex(folder, "one_batch", DataplaneConfig(capacity_bytes=1 << 20, segment_bytes=1 << 16), os.getpid())
    try:
        store = Store(index, writer="example", folder=index.path, config=DataplaneConfig(capacity_bytes=1 << 20, segment_bytes=1 << 16))
        meta = put(store, trajectories, extra or {})
        if order is not None:
            meta.reorder(order)
        stored = store.kv_batch_get(meta.keys, meta.partition_id)
        padded = T.to_padded_dataproto(stored, pad_token_id=0)
        judged = advantages(meta, padded)
        return Walk(collated, trajectories, meta, stored, padded, judged, write_back(store, meta, stored, judged))
    finally:
        index.close()


def write_rows(folder: Path, answers: dict[str, list[str]]) -> Path:
    """The data file, one JSON object a row."""
    rows = [
        {
            "data_source": "example",
            "prompt": [{"role": "user", "content": PROMPTS[uid]}],
            "reward_model": {"style": "rule", "ground_truth": uid},
            "extra_info": {"index": i},
        }
        for i, uid in enumerate(answers)
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


async def roll_out(data: DataConfig, answers: dict[str, list[str]]) -> list[Trajectory]:
    """Prompts from the stream, named A and B here, and n sessions of each."""
    n = len(next(iter(answers.values())))
    texts = {(uid, session): text for uid, group in answers.items() for session, text in enumerate(group)}
    runner = GroupSessionRunner(
        rollout=RolloutConfig(n=n), data=data, tokenizer=CharTokenizer(), generate=FixedAnswers(texts), scorer=FirstCharacter(), run_seed=0
    )
    prompts = await PromptStream(data, run_seed=0, total_epochs=1).next_prompts(len(answers))
    leases = [GroupLease(uid, 1, seq_no, prompt.row, n, 1) for seq_no, (uid, prompt) in enumerate(zip(answers, prompts, strict=True))]
    sessions = [await runner.run(lease, session_id, 0) for lease in leases for session_id in range(n)]
    return [row for rows in sessions for row in rows]


def put(store: Store, trajectories: list[Trajectory], extra: dict[str, Any]) -> KVBatchMeta:
    """The rows go into the store; what goes on is their keys and tags."""
    tags = [trajectory_tag(row, 1, 0, 1) for row in trajectories]
    asyncio.run(store.put_trajectories(trajectories, tags))
    keys = [str(row.key) for row in trajectories]
    old = [np.full(len(row.response_ids), -0.5, np.float32) for row in trajectories]
    store.kv_batch_put(keys, "train", fields={"old_log_probs": old, **extra})  # the learner's, before the update
    return KVBatchMeta("train", keys, tags)


def advantages(meta: KVBatchMeta, padded: DataProto) -> Judgement:
    """The advantage stage of rank 0, on columns [B, R]."""
    batch = padded.batch
    assert batch is not None
    return judge(meta.keys, batch["response_mask"], batch["rm_scores"], batch["old_log_probs"], batch["rollout_log_probs"], AlgorithmConfig())


def write_back(store: Store, meta: KVBatchMeta, stored: TensorDict, judged: Judgement) -> TensorDict:
    """Dense columns become jagged again and new columns of the same keys."""
    names = ("token_level_rewards", "advantages", "returns")
    nested = {name: T.response_to_nested(getattr(judged, name), stored["response_mask"]) for name in names}
    store.kv_batch_put(meta.keys, meta.partition_id, fields=nested)
    return store.kv_batch_get(meta.keys, meta.partition_id, select_fields=["responses", *names])


def report(done: Walk) -> list[str]:
    """One line a stage: unit, container, data or key, and the numbers."""
    collated, td, batch = done.collated, done.stored, done.padded.batch
    assert batch is not None
    shares, first = plan_shares(done.meta, RANKS, ACTOR), done.trajectories[0]
    raw, dummy = list(collated["raw_prompt"].shape), list(collated["dummy_tensor"].shape)
    works = plan_update(done.meta, RANKS, ACTOR, global_step=1, total_steps=1)
    tokens = [sum(tag["seq_len"] for tag in share.tags) for share in shares]
    return [
        "stage        unit        container    holds  content",
        "dataset      prompt      dict         data   messages, no token ids: " + json.dumps(collated["raw_prompt"][0]),
        f"loader       prompt      dict         data   raw_prompt object {raw}, dummy_tensor uint8 {dummy}",
        f"agent loop   trajectory  Trajectory   data   {len(done.trajectories)} rows; {first.key}: prompt {first.prompt_ids}, answer {first.response_ids}",
        f"replay       trajectory  KVBatchMeta  key    {', '.join(done.meta.keys)}",
        _jagged("store", td, "prompts"),
        _jagged("store", td, "responses"),
        _jagged("store", td, "input_ids"),
        f"padded       trajectory  DataProto    data   response_mask {list(batch['response_mask'].shape)}, {int(batch['response_mask'].sum())} ones, "
        f"{int((batch['response_mask'] == 0).sum())} padded slots; rm_scores non-zero at {[tuple(place) for place in batch['rm_scores'].nonzero().tolist()]}",
        f"advantage    trajectory  tensors      data   {_per_row(done.judged.advantages[:, 0])}",
        _jagged("write-back", done.returned, "advantages"),
        f"mini-batch   trajectory  UpdateWork   key    ppo_mini_batch_size {ACTOR.ppo_mini_batch_size} x n = {len(done.meta)} rows; "
        f"{RANKS} ranks: {' + '.join(str(len(share)) for share in shares)}; {ACTOR.ppo_epochs} epochs: {len(works[0].mini_batches)} optimizer steps",
        f"balance      trajectory  KVBatchMeta  key    tokens per rank {tokens}",
    ]


def _jagged(stage: str, td: TensorDict, name: str) -> str:
    column = td[name]
    return f"{stage:<13}trajectory  TensorDict   data   {name} [6, j], lengths {T.lengths_of(column).tolist()}, offsets {column.offsets().tolist()}"


def _per_row(values: torch.Tensor) -> str:
    return "per row " + ", ".join(f"{value:.6f}" for value in values.tolist())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print("\n".join(report(walk(Path(folder)))))


if __name__ == "__main__":
    main()
